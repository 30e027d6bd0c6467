#include "layout/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"
#include "layout/fallback.h"
#include "layout/rows.h"

namespace lacuna::layout {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(LayoutTable, EveryNameAndTypeIsFound) {
  ASSERT_EQ(row_layouts().size(), 13u);
  for (const Layout& layout : row_layouts()) {
    EXPECT_EQ(find(layout.name), &layout);
    EXPECT_EQ(find_ggml_type(layout.ggml_type), &layout);
    EXPECT_EQ(&get(layout.id), &layout);
    EXPECT_NE(known_names().find(layout.name), std::string_view::npos);
  }
  EXPECT_EQ(find("q4_k"), nullptr) << "names are exact";
  EXPECT_EQ(find(""), nullptr);
  EXPECT_EQ(find_ggml_type(-1), nullptr);
  EXPECT_EQ(find_ggml_type(255), nullptr);
  EXPECT_EQ(find_ggml_type(9), nullptr) << "Q8_1 is not a stored type";
  EXPECT_TRUE(known_names().starts_with("f32, f16, bf16, q4_0"));
}

TEST(LayoutTable, BitsPerWeight) {
  EXPECT_EQ(get(Id::q4_K).bits_per_weight(), 4.5);
  EXPECT_EQ(get(Id::q6_K).bits_per_weight(), 6.5625);
  EXPECT_EQ(get(Id::q8_0).bits_per_weight(), 8.5);
  EXPECT_EQ(get(Id::bf16).bits_per_weight(), 16.0);
}

TEST(SizeBytes, Exact) {
  const auto size = [](Id id, int64_t N, int64_t K) { return get(id).size_bytes({N, K}); };
  EXPECT_EQ(size(Id::q4_K, 3, 512), 3 * 2 * 144);
  EXPECT_EQ(size(Id::q8_0, 1000, 4544), 1000 * 142 * 34);
  EXPECT_EQ(size(Id::f32, 7, 257), 7 * 257 * 4);
  EXPECT_EQ(size(Id::f16, 0, 257), 0);
  EXPECT_EQ(size(Id::q4_K, 5, 0), 0);
}

TEST(SizeBytes, SaysWhatToDoWhenTheRowDoesNotFit) {
  const auto size = [](Id id, int64_t N, int64_t K) { return [=] { get(id).size_bytes({N, K}); }; };
  EXPECT_THAT(size(Id::q4_K, 9, 576),
              ThrowsMessage<Error>("K = 576, but q4_K needs a multiple of 256; store it as q5_0 instead"));
  EXPECT_THAT(size(Id::q8_0, 9, 257),
              ThrowsMessage<Error>("K = 257, but q8_0 needs a multiple of 32; store it as f16 instead"));
  EXPECT_THAT(size(Id::q6_K, 9, 1), ThrowsMessage<Error>(AllOf(HasSubstr("K = 1"), HasSubstr("f16"))));
}

// RECIPES 1: sizes that wrap 64 bits.
TEST(SizeBytes, RefusesOverflowAndNegativeDims) {
  for (const Layout& layout : row_layouts()) {
    const int64_t K = int64_t{1} << 32;
    EXPECT_THROW(layout.size_bytes({int64_t{1} << 34, K}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({-1, 256}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({1, -256}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({1152, std::numeric_limits<int64_t>::max() / 256 * 256}), Error) << layout.name;
  }
}

// RECIPES 8: row lengths that fit no superblock.
TEST(FittingLayout, TakesTheSubstitutesOfLlamaCpp) {
  EXPECT_EQ(fitting_layout(Id::q4_K, 4096), Id::q4_K);
  EXPECT_EQ(fitting_layout(Id::q2_K, 4544), Id::q4_0);
  EXPECT_EQ(fitting_layout(Id::q3_K, 576), Id::q4_0);
  EXPECT_EQ(fitting_layout(Id::q4_K, 576), Id::q5_0);
  EXPECT_EQ(fitting_layout(Id::q5_K, 2688), Id::q5_1);
  EXPECT_EQ(fitting_layout(Id::q6_K, 288), Id::q8_0);
  for (const Id id : {Id::q2_K, Id::q3_K, Id::q4_K, Id::q5_K, Id::q6_K, Id::q4_0, Id::q8_0, Id::f16})
    for (const int64_t K : {257, 255, 1, 48}) EXPECT_EQ(fitting_layout(id, K), Id::f16) << get(id).name << " " << K;
  EXPECT_EQ(fitting_layout(Id::f32, 255), Id::f32);
  EXPECT_EQ(fitting_layout(Id::q5_0, 32), Id::q5_0);
}

TEST(FittingLayout, AlwaysFits) {
  for (const Layout& layout : row_layouts())
    for (const int64_t K : {4544, 576, 2688, 288, 257, 255, 32, 1}) {
      const Layout& fitting = get(fitting_layout(layout.id, K));
      EXPECT_EQ(K % fitting.block_cols, 0);
      const auto w = test_rows::bell(size_t(K), 5);
      const auto stored = test_rows::stored(fitting, w);
      // The coarsest of the layouts that such rows end in has 16 levels.
      EXPECT_LT(test_rows::squared_error(w, stored), 0.02 * test_rows::squared_error(w, std::vector<float>(w.size())))
          << fitting.name << " " << K;
    }
}

// A row's bytes do not depend on what stands beside it: blocks are encoded in groups, the last group may be partial.
TEST(EncodeRow, BlocksAreIndependent) {
  for (const Layout& layout : row_layouts()) {
    const size_t cols = size_t(layout.block_cols), K = 9 * cols;
    const auto w = test_rows::bell(K, 17), p = test_rows::importance(K, 18);
    const auto row = test_rows::encode(layout, w, p);
    for (size_t b = 0; b < K / cols; ++b) {
      const auto block =
          test_rows::encode(layout, std::span(w).subspan(b * cols, cols), std::span(p).subspan(b * cols, cols));
      EXPECT_TRUE(std::equal(block.begin(), block.end(), row.begin() + ptrdiff_t(b * block.size())))
          << layout.name << " block " << b;
    }
  }
}

TEST(DecodeRow, AnyAlignment) {
  for (const Layout& layout : row_layouts()) {
    const auto w = test_rows::bell(512, 3);
    auto row = test_rows::encode(layout, w);
    const auto expected = test_rows::decode(layout, row, 512);
    row.insert(row.begin(), std::byte{0});
    EXPECT_EQ(test_rows::decode(layout, std::span(row).subspan(1), 512), expected) << layout.name;
  }
}

TEST(DecodeRows, PicksTheRows) {
  const Layout& layout = get(Id::q8_0);
  const Shape shape{5, 64};
  std::vector<std::byte> matrix;
  for (uint64_t n = 0; n < 5; ++n) {
    const auto row = test_rows::encode(layout, test_rows::bell(64, n));
    matrix.insert(matrix.end(), row.begin(), row.end());
  }
  std::vector<float> out(2 * 64);
  decode_rows(layout, shape, matrix, 3, 2, out.data());
  for (uint64_t n : {3, 4}) {
    const auto expected = test_rows::stored(layout, test_rows::bell(64, n));
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out.begin() + ptrdiff_t((n - 3) * 64)));
  }
  decode_rows(layout, shape, matrix, 5, 0, out.data());  // nothing to do, nothing touched
}

TEST(ProjectRow, IsDecodeOfEncode) {
  for (const Layout& layout : row_layouts()) {
    auto w = test_rows::bell(512, 21);
    const auto p = test_rows::importance(512, 22);
    const auto expected = test_rows::stored(layout, w, p);
    project_row(layout, w, p);
    EXPECT_EQ(w, expected) << layout.name;
  }
  std::vector<float> odd(100);
  EXPECT_THROW(project_row(get(Id::q4_K), odd), Error);
}

// A symmetric block that was stored once is stored without further loss: its scale and codes are found again.
TEST(ProjectRow, SymmetricBlocksAreFixedPoints) {
  for (const Id id : {Id::f16, Id::bf16, Id::q4_0, Id::q5_0, Id::q8_0}) {
    const auto once = test_rows::stored(get(id), test_rows::bell(4096, 33));
    EXPECT_EQ(test_rows::stored(get(id), once), once) << get(id).name;
  }
}

TEST(FirstBadRow, FindsNonFiniteScales) {
  constexpr uint16_t kInfinity = 0x7c00, kNegativeInfinity = 0xfc00, kNan = 0x7e01, kLargest = 0x7bff;
  struct Field {
    Id id;
    size_t offset;  // of an f16 in the block
  };
  for (const Field field : {Field{Id::f16, 0}, Field{Id::q4_0, 0}, Field{Id::q4_1, 0}, Field{Id::q4_1, 2},
                            Field{Id::q5_0, 0}, Field{Id::q5_1, 0}, Field{Id::q5_1, 2}, Field{Id::q8_0, 0},
                            Field{Id::q2_K, 80}, Field{Id::q2_K, 82}, Field{Id::q3_K, 108}, Field{Id::q4_K, 0},
                            Field{Id::q4_K, 2}, Field{Id::q5_K, 0}, Field{Id::q5_K, 2}, Field{Id::q6_K, 208}}) {
    const Layout& layout = get(field.id);
    const Shape shape{4, 512};
    const std::vector<std::byte> sound(size_t(layout.size_bytes(shape)), std::byte{0});
    EXPECT_EQ(first_bad_row(layout, shape, sound), -1) << layout.name;
    for (const uint16_t bits : {kInfinity, kNegativeInfinity, kNan}) {
      auto bytes = sound;
      const size_t last_block = size_t(3 * layout.row_bytes(512) - layout.block_bytes);  // of row 2
      std::memcpy(bytes.data() + last_block + field.offset, &bits, 2);
      EXPECT_EQ(first_bad_row(layout, shape, bytes), 2) << layout.name << " offset " << field.offset;
      std::memcpy(bytes.data() + last_block + field.offset, &kLargest, 2);
      EXPECT_EQ(first_bad_row(layout, shape, bytes), -1) << layout.name << " offset " << field.offset;
    }
  }
}

TEST(FirstBadRow, FloatRows) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> f32(3 * 7, std::numeric_limits<float>::max());
    std::vector<bf16> half(3 * 7, bf16{0x7f7f});
    EXPECT_EQ(first_bad_row(get(Id::f32), {3, 7}, std::as_bytes(std::span(f32))), -1);
    EXPECT_EQ(first_bad_row(get(Id::bf16), {3, 7}, std::as_bytes(std::span(half))), -1);
    f32[13] = bad;
    half[13] = to_bf16(bad);
    EXPECT_EQ(first_bad_row(get(Id::f32), {3, 7}, std::as_bytes(std::span(f32))), 1);
    EXPECT_EQ(first_bad_row(get(Id::bf16), {3, 7}, std::as_bytes(std::span(half))), 1);
    EXPECT_THAT(
        [&] {
          check_bytes(get(Id::bf16), {3, 7}, std::as_bytes(std::span(half)));
        },
        ThrowsMessage<Error>(HasSubstr("row 1 in bf16 has a value that is not finite")));
  }
  EXPECT_EQ(first_bad_row(get(Id::f32), {0, 7}, {}), -1);
}

TEST(FindNonFinite, EveryPlace) {
  std::vector<float> values(10000, -3.0e38f);
  EXPECT_EQ(find_non_finite(values), -1);
  EXPECT_EQ(find_non_finite({}), -1);
  for (const size_t place : {0u, 1u, 4095u, 4096u, 8191u, 8192u, 9999u})
    for (const float bad : {float(NAN), -float(NAN), float(INFINITY), -float(INFINITY)}) {
      values[place] = bad;
      values[9999] = bad;
      EXPECT_EQ(find_non_finite(values), int64_t(place));
      values[place] = values[9999] = 1e-40f;
    }
}

}  // namespace
}  // namespace lacuna::layout
