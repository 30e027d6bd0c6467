// tests/kernels/cuda_groups_form_test.cc - the prepared form of group-sparse layouts, read back as groups_form.h
// describes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cuda/groups_form.h"
#include "kernels/cuda/units_form.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using cuda::GroupForm;
using cuda::GroupsForm;
using cuda::PreparedGroups;
using kernels::WeightView;
using layout::Id;

WeightView view_of(const test::GroupedWeight& w) { return {"w", w.layout, w.shape, w.bytes, {}, w.params}; }

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

/// A chunk, slot by slot.
struct Chunk {
  GroupForm form;
  const std::byte* bytes;

  uint32_t places(int tile) const { return read<uint32_t>(bytes + form.place_at + 8 * (tile % 4) + 4 * (tile / 4)); }
  int64_t place(int tile, int slot) const {
    const uint32_t p = places(tile);
    return slot < int(p >> 27) ? p & 0xffff : (p & 0xffff) + (p >> 16 & 2047);
  }
  /// Of what lane slot % 8 * 4 + tile % 4 has four of.
  static int order(int tile, int slot) { return (slot % 8 * 4 + tile % 4) * 4 + tile / 4 * 2 + slot / 8; }
  int row(int tile, int slot) const { return int(bytes[form.row_at + order(tile, slot)]); }
  float scale(int tile, int slot) const { return to_float(read<f16>(bytes + form.scale_at + 2 * order(tile, slot))); }
  int zero(int tile, int slot) const {
    const int bit = order(tile, slot) * form.width;
    return int(bytes[form.zero_at + bit / 8]) >> (bit % 8) & ((1 << form.width) - 1);
  }
  float weight(int tile, int slot, int k) const {
    const int lane = slot % 8 * 4 + k % 8 / 2, piece = k / 8 / form.half, step = tile * form.half + k / 8 % form.half;
    const auto word = [&](int w) {
      const int t = form.together();
      return read<uint32_t>(bytes + size_t{4} * size_t(((piece * form.words + w / t * t) * 32 + lane * t) + w % t));
    };
    if (!form.coded) return to_float(f16{uint16_t(word(2 * step + slot / 8) >> (16 * (k % 2)))});
    const int shift = 16 * (k % 2) + 8 * (slot / 8) + form.width * (step % form.positions);
    const int code = int(word(step / form.positions) >> shift & ((1u << form.width) - 1));
    return scale(tile, slot) * float(code - zero(tile, slot));
  }
};

/// What the form says, [256 panels, K].
std::vector<float> decode(const PreparedGroups& w) {
  const GroupForm form(w.layout->bits, int(w.group));
  std::vector<float> out(size_t(w.panels * cuda::kPanelRows * w.K));
  for (int64_t panel = 0; panel < w.panels; ++panel) {
    int64_t before = -1;
    for (uint32_t c = w.start[size_t(panel)]; c < w.start[size_t(panel) + 1]; ++c) {
      const Chunk chunk{form, w.chunks.data() + int64_t{c} * form.bytes};
      for (int tile = 0; tile < cuda::kChunkTiles; ++tile) {
        EXPECT_GE(chunk.place(tile, 0), before);
        before = chunk.place(tile, 15);
        for (int slot = 0; slot < cuda::kTileSlots; ++slot) {
          const int64_t n = panel * cuda::kPanelRows + chunk.row(tile, slot), k0 = chunk.place(tile, slot) * w.group;
          for (int k = 0; k < w.group && k0 + k < w.K; ++k)
            out[size_t(n * w.K + k0 + k)] += chunk.weight(tile, slot, k);  // slots without a group add zeros
        }
      }
    }
  }
  return out;
}

TEST(CudaGroupsForm, HoldsTheWeights) {
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4, Id::gs8, Id::gs16}) {
    for (const int64_t g : {8, 16, 32, 64, 128}) {
      for (const double sparsity : {0.0, 0.5, 0.95}) {
        test::GroupedOptions options{.group_size = g, .sparsity = sparsity, .dropped_row = 3, .dropped_input = 2 * g};
        const std::vector<test::GroupedWeight> parts = {test::grouped_weight(id, 300, 5 * g + 3, 1, options),
                                                        test::grouped_weight(id, 7, 5 * g + 3, 2, options)};
        const std::vector<WeightView> views = {view_of(parts[0]), view_of(parts[1])};
        const PreparedGroups prepared = cuda::prepare_groups(views, test::pool(), GroupsForm::chunks);
        ASSERT_EQ(prepared.panels, 3);
        const std::vector<float> decoded = decode(prepared);
        for (size_t p = 0; p < parts.size(); ++p) {
          const test::GroupedWeight& part = parts[p];
          for (int64_t n = 0; n < part.shape.N; ++n) {
            const int64_t at = prepared.first_output[p] + n;
            double sum = 0;
            float largest = 0;
            for (int64_t k = 0; k < part.shape.K; ++k) {
              const float w = part.decoded[size_t(n * part.shape.K + k)];
              ASSERT_EQ(decoded[size_t(at * part.shape.K + k)], w)
                  << part.layout->name << " g" << g << " [" << n << ", " << k << "]";
              sum += std::fabs(double(w));
              largest = std::max(largest, std::fabs(w));
            }
            EXPECT_GE(double(prepared.bound[size_t(at / cuda::kPanelRows)]), sum);
            const float scaled = largest / prepared.scale[size_t(at)];
            EXPECT_TRUE(largest == 0 || (scaled >= 0x1p14f && scaled < 0x1p15f)) << scaled;
          }
        }
      }
    }
  }
}

// Places further apart than a tile can say, and tiles that would have a third place.
TEST(CudaGroupsForm, PlacesFarApart) {
  test::GroupedOptions options{.group_size = 8, .sparsity = 0.9998};
  const test::GroupedWeight w = test::grouped_weight(Id::gs4, 5, 65536, 4, options);
  const WeightView view = view_of(w);
  const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool(), GroupsForm::chunks);
  const std::vector<float> decoded = decode(prepared);
  EXPECT_TRUE(std::equal(w.decoded.begin(), w.decoded.end(), decoded.begin()));
}

TEST(CudaGroupsForm, TakesLittleMoreThanTheWeights) {
  const test::GroupedWeight w = test::grouped_weight(Id::gs4, 512, 4096, 1, {.group_size = 16, .sparsity = 0.5});
  const WeightView view = view_of(w);
  const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool(), GroupsForm::chunks);
  // 8 bytes of codes, 2 of scale, 1 of row, half a byte of zero, a quarter of places; the end of a panel.
  EXPECT_LE(double(prepared.chunks.size()), 11.75 * double(w.params.kept_groups) * 1.005 + 2 * 1504);
}

/// What units say, [256 panels, K]. at_its_place: of the units with a group, those in the lane of their class.
std::vector<float> decode_units(const PreparedGroups& w, double& at_its_place) {
  const cuda::UnitForm form(w.layout->bits);
  const int64_t places = (w.K + cuda::kUnit - 1) / cuda::kUnit;
  std::vector<float> out(size_t(w.panels * cuda::kPanelRows * w.K));
  int64_t units = 0, placed = 0;
  for (size_t q = 0; q < w.quads.size(); ++q) {
    const cuda::Quad& quad = w.quads[q];
    EXPECT_EQ(quad.first, q == 0 ? 0 : w.quads[q - 1].end);
    for (uint32_t r = quad.first; r < quad.end; ++r) {
      EXPECT_EQ(w.quad_of[r], q);
      const std::byte* const record = w.chunks.data() + int64_t{r} * form.bytes;
      for (int lane = 0; lane < 32; ++lane)
        for (int which = 0; which < cuda::kLaneUnits; ++which) {
          const int at = lane * cuda::kLaneUnits + which;
          const auto index = read<uint16_t>(record + form.index_at + 2 * at);
          const auto output = read<uint32_t>(record + form.output_at + 4 * (lane / 8));
          EXPECT_EQ((output & cuda::kQuadBegins) != 0, r == quad.first);
          EXPECT_EQ((output & cuda::kQuadEnds) != 0, r + 1 == quad.end);
          const int64_t place = index & 4095, n = output & cuda::kOutput;
          EXPECT_GE(q, w.start[size_t(n / cuda::kPanelRows)]);
          EXPECT_LT(q, w.start[size_t(n / cuda::kPanelRows) + 1]);
          if (place == places) continue;
          ++units;
          placed += place % 8 == lane % 8;
          const float scale = to_float(read<f16>(record + form.scale_at + 2 * at));
          for (int k = 0; k < cuda::kUnit && place * cuda::kUnit + k < w.K; ++k) {
            const int per_word = 32 / form.width, in_word = k % per_word;
            const auto byte = uint32_t(record[(at * form.words + k / per_word) * 4 + in_word % 4]);
            const int code = int(byte >> (form.width * (in_word / 4)) & ((1u << form.width) - 1));
            out[size_t(n * w.K + place * cuda::kUnit + k)] += scale * float(code - int(index >> 12));
          }
        }
    }
  }
  at_its_place = units == 0 ? 1 : double(placed) / double(units);
  return out;
}

TEST(CudaUnitsForm, HoldsTheWeights) {
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4}) {
    for (const int64_t g : {16, 32, 64, 128}) {
      for (const double sparsity : {0.0, 0.5, 0.95}) {
        test::GroupedOptions options{.group_size = g, .sparsity = sparsity, .dropped_row = 3, .dropped_input = 2 * g};
        const std::vector<test::GroupedWeight> parts = {test::grouped_weight(id, 301, 5 * g + 3, 1, options),
                                                        test::grouped_weight(id, 7, 5 * g + 3, 2, options)};
        const std::vector<WeightView> views = {view_of(parts[0]), view_of(parts[1])};
        const PreparedGroups prepared = cuda::prepare_groups(views, test::pool());
        ASSERT_EQ(prepared.panels, 3);
        ASSERT_EQ(prepared.start.back(), prepared.quads.size());
        EXPECT_LE(prepared.bytes(), cuda::most_group_bytes(views[0]) + cuda::most_group_bytes(views[1]));
        double at_its_place = 0;
        const std::vector<float> decoded = decode_units(prepared, at_its_place);
        for (size_t p = 0; p < parts.size(); ++p)
          for (int64_t n = 0; n < parts[p].shape.N; ++n)
            for (int64_t k = 0; k < parts[p].shape.K; ++k)
              ASSERT_EQ(decoded[size_t((prepared.first_output[p] + n) * parts[p].shape.K + k)],
                        parts[p].decoded[size_t(n * parts[p].shape.K + k)])
                  << parts[p].layout->name << " g" << g << " [" << n << ", " << k << "]";
      }
    }
  }
}

// 8 bytes of codes, 2 of scale, 2 of place and zero a unit, a quarter for the rows. Rows differ in length, and four
// have the records of the longest. Of 128 units 16 are of a class in the mean, with a deviation of 2.6: some ten in a
// hundred have no room in their own lane.
TEST(CudaUnitsForm, TakesLittleMoreThanTheWeights) {
  const test::GroupedWeight w = test::grouped_weight(Id::gs4, 512, 4096, 1, {.group_size = 16, .sparsity = 0.5});
  const WeightView view = view_of(w);
  const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool());
  EXPECT_LE(double(prepared.bytes()), 12.25 * double(w.params.kept_groups) * 1.1);
  double at_its_place = 0;
  decode_units(prepared, at_its_place);
  EXPECT_GE(at_its_place, 0.85);
}

TEST(CudaUnitsForm, OnlyWhereAUnitHasOneScale) {
  EXPECT_TRUE(cuda::has_units(layout::get(Id::gs3), 32, 65520));
  EXPECT_FALSE(cuda::has_units(layout::get(Id::gs3), 32, 65536));
  EXPECT_FALSE(cuda::has_units(layout::get(Id::gs4), 8, 4096));
  EXPECT_FALSE(cuda::has_units(layout::get(Id::gs8), 16, 4096));
  const test::GroupedWeight w = test::grouped_weight(Id::gs8, 5, 64, 4, {.group_size = 16, .sparsity = 0.5});
  const WeightView view = view_of(w);
  EXPECT_THROW(cuda::prepare_groups({&view, 1}, test::pool(), GroupsForm::units), Error);
}

TEST(CudaGroupsForm, ErrorsNameTheWeight) {
  const test::GroupedWeight a = test::grouped_weight(Id::gs4, 5, 64, 4, {.group_size = 8, .sparsity = 0.5}),
                            b = test::grouped_weight(Id::gs4, 5, 64, 4, {.group_size = 16, .sparsity = 0.5}),
                            wide = test::grouped_weight(Id::gs4, 1, 65537, 4, {.group_size = 16, .sparsity = 0.5});
  const std::vector<WeightView> two = {view_of(a), view_of(b)}, one = {view_of(wide)};
  EXPECT_THROW(cuda::prepare_groups(two, test::pool()), Error);
  try {
    cuda::prepare_groups(one, test::pool());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("w: K = 65537"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lacuna
