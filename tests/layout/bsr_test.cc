// tests/layout/bsr_test.cc - the three arrays of GQSA to and from codes and gs bytes.
#include "layout/bsr.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"

namespace lacuna::layout {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

/// The worked example of GQSA, section 3.2 (Figure 3): four rows in groups of four weights, the third row empty.
/// Its text gives rowIndex, the values and groups[1] = 0, groups[3] = 5; groups[0] and groups[2] are drawn only, and
/// are 1 and 2 here. The text gives no scales; these are ours.
Bsr worked_example() {
  return {{4, 24},
          4,
          {0, 1, 3, 3, 4},
          {1, 0, 2, 5},
          {5, 1, 15, 1, 15, 13, 2, 1, 1, 7, 14, 0, 0, 3, 6, 15},
          {1, 0.5f, 2, 0.25f},
          {8, 7, 0, 15}};
}

TEST(Bsr, WorkedExampleOfThePaper) {
  const Bsr bsr = worked_example();
  const DenseCodes dense = from_bsr(bsr);
  const auto row = [&](const std::vector<uint8_t>& all, size_t n) {
    return std::vector<int>(all.begin() + ptrdiff_t(24 * n), all.begin() + ptrdiff_t(24 * n + 24));
  };
  EXPECT_EQ(row(dense.code, 0),
            (std::vector<int>{0, 0, 0, 0, 5, 1, 15, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(row(dense.code, 1),
            (std::vector<int>{15, 13, 2, 1, 0, 0, 0, 0, 1, 7, 14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(row(dense.keep, 2), std::vector<int>(24, 0)) << "rowIndex[2] = rowIndex[3]: nothing is kept";
  EXPECT_EQ(row(dense.code, 3),
            (std::vector<int>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 6, 15}));
  EXPECT_EQ(std::count(dense.keep.begin(), dense.keep.end(), 1), 16);
  EXPECT_EQ(dense.keep[3 * 24 + 20], 1) << "a kept code 0 is kept";
  EXPECT_EQ(dense.scale[6 + 2], 2);
  EXPECT_EQ(dense.zero[18 + 5], 15);

  const Bsr back = to_bsr(bsr.shape, 4, dense.codes());
  EXPECT_EQ(back.row_index, bsr.row_index);
  EXPECT_EQ(back.groups, bsr.groups);
  EXPECT_EQ(back.values, bsr.values);
  EXPECT_EQ(back.scale, bsr.scale);
  EXPECT_EQ(back.zero, bsr.zero);
}

TEST(Bsr, GsBytesComeBack) {
  Rng rng(3);
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4, Id::gs8}) {
    const Layout& layout = get(id);
    for (const int64_t g : {8, 32, 128}) {
      for (const Shape shape : {Shape{1, 1}, {9, 300}, {4, 256}}) {
        Bsr bsr{shape, g, {0}, {}, {}, {}, {}};
        for (int64_t n = 0; n < shape.N; ++n) {
          for (int64_t i = 0; i < group_count(shape.K, g); ++i) {
            if (rng.below(3) == 0 || n == 2) continue;
            bsr.groups.push_back(i);
            bsr.scale.push_back(to_float(to_f16(float(rng.normal()))));
            bsr.zero.push_back(float(rng.below(uint64_t{1} << layout.bits)));
            for (int64_t k = 0; k < g; ++k)
              bsr.values.push_back(i * g + k < shape.K ? uint8_t(rng.below(uint64_t{1} << layout.bits)) : uint8_t{0});
          }
          bsr.row_index.push_back(int64_t(bsr.groups.size()));
        }
        std::vector<std::byte> bytes;
        const Params params = import_bsr(layout, bsr, bytes);
        EXPECT_EQ(params.kept_groups, int64_t(bsr.groups.size()));
        EXPECT_EQ(first_bad_row(layout, shape, bytes, params), -1);
        const Bsr back = export_bsr(layout, shape, params, bytes);
        EXPECT_EQ(back.row_index, bsr.row_index);
        EXPECT_EQ(back.groups, bsr.groups);
        EXPECT_EQ(back.values, bsr.values);
        EXPECT_EQ(back.scale, bsr.scale);
        EXPECT_EQ(back.zero, bsr.zero);
      }
    }
  }
}

TEST(Bsr, ArraysThatContradictAreRefused) {
  const auto refuse = [](auto change, const std::string& what) {
    Bsr bsr = worked_example();
    change(bsr);
    EXPECT_THAT([&] { from_bsr(bsr); }, ThrowsMessage<Error>(HasSubstr(what)));
  };
  refuse([](Bsr& b) { b.row_index.pop_back(); }, "row_index must have 5 numbers");
  refuse([](Bsr& b) { b.row_index.clear(); }, "row_index must have 5 numbers");
  refuse([](Bsr& b) { b.row_index[0] = 1; }, "row_index must have 5 numbers");
  refuse([](Bsr& b) { b.row_index[4] = 5; }, "row_index must have 5 numbers");
  refuse([](Bsr& b) { b.row_index[1] = 4; }, "row 1 has the groups 4 to 3 of 4");
  refuse([](Bsr& b) { b.row_index[1] = -1; }, "row 0 has the groups 0 to -1");
  refuse([](Bsr& b) { b.row_index[1] = INT64_MAX; }, "row 0 has the groups 0 to");
  refuse([](Bsr& b) { b.groups[3] = 6; }, "group 0 of row 3 is 6, but it must lie between 0 and 5");
  refuse([](Bsr& b) { b.groups[2] = 0; }, "group 1 of row 1 is 0, but it must lie between 1 and 5");
  refuse([](Bsr& b) { b.groups[0] = -1; }, "group 0 of row 0 is -1");
  refuse([](Bsr& b) { b.values.pop_back(); }, "got 15 values");
  refuse([](Bsr& b) { b.scale.pop_back(); }, "3 scales");
  refuse([](Bsr& b) { b.group_size = 0; }, "group_size is 0");
  refuse([](Bsr& b) { b.group_size = INT64_MAX; }, "need as many values");
  refuse([](Bsr& b) { b.shape = {4, 22}; }, "row 3 has a value for input 22, but K is 22");
  refuse([](Bsr& b) { b.shape = {4, INT64_MAX}; }, "cannot be");

  std::vector<std::byte> out;
  EXPECT_THAT([&] { import_bsr(get(Id::gs4), worked_example(), out); },
              ThrowsMessage<Error>(HasSubstr("group_size is 4, but gs4 has groups of 8")));
  EXPECT_THAT([&] { import_bsr(get(Id::bm4), worked_example(), out); },
              ThrowsMessage<Error>(HasSubstr("bm4 does not hold codes of kept groups")));
  DenseCodes dense = from_bsr(worked_example());
  dense.keep[5] = 0;
  EXPECT_THAT(
      [&] {
        to_bsr({4, 24}, 4, dense.codes());
      },
      ThrowsMessage<Error>(HasSubstr("row 0 keeps 3 of the 4 weights of group 1")));
  dense.code.pop_back();
  EXPECT_THAT([&] { to_bsr({4, 24}, 4, dense.codes()); }, ThrowsMessage<Error>(HasSubstr("needs 96 codes")));
}

}  // namespace
}  // namespace lacuna::layout
