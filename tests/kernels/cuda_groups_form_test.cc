// tests/kernels/cuda_groups_form_test.cc - the prepared form of group-sparse layouts, read back as groups_form.h
// describes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cuda/groups_form.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using cuda::GroupForm;
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
        const PreparedGroups prepared = cuda::prepare_groups(views, test::pool());
        ASSERT_EQ(prepared.panels, 3);
        EXPECT_LE(prepared.bytes(), cuda::most_group_bytes(views[0]) + cuda::most_group_bytes(views[1]));
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
  const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool());
  const std::vector<float> decoded = decode(prepared);
  EXPECT_TRUE(std::equal(w.decoded.begin(), w.decoded.end(), decoded.begin()));
}

// What a kernel stages of the inputs for a chunk has a bound.
TEST(CudaGroupsForm, AChunkHasPlacesOf4096Inputs) {
  for (const int64_t g : {8, 128}) {
    const test::GroupedWeight w =
        test::grouped_weight(Id::gs4, 7, 20000, 4, {.group_size = g, .sparsity = g == 8 ? 0.99 : 0.7});
    const WeightView view = view_of(w);
    const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool());
    EXPECT_GE(prepared.start.back(), 5u);
    for (uint32_t c = 0; c < prepared.start.back(); ++c) {
      const GroupForm form(4, int(g));
      const Chunk chunk{form, prepared.chunks.data() + int64_t{c} * form.bytes};
      EXPECT_LE((chunk.place(7, 15) - chunk.place(0, 0) + 1) * g, cuda::kChunkInputs) << "chunk " << c;
    }
  }
}

// 32 slots are added at once. In the order of rows they would lie in 16 to 18 banks, since four tiles of a place are 32
// rows apart; a place keeps four of the eight rows of a bank in the mean.
TEST(CudaGroupsForm, SumsOfAWarpLieInDifferentBanks) {
  const test::GroupedWeight w = test::grouped_weight(Id::gs4, 512, 4096, 1, {.group_size = 16, .sparsity = 0.5});
  const WeightView view = view_of(w);
  const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool());
  const GroupForm form(4, 16);
  int64_t banks = 0, additions = 0;
  for (uint32_t c = 0; c + 1 < prepared.start[1]; ++c) {
    const Chunk chunk{form, prepared.chunks.data() + int64_t{c} * form.bytes};
    for (int h = 0; h < 2; ++h)
      for (int q = 0; q < 2; ++q) {
        uint32_t found = 0;
        for (int tile = 4 * q; tile < 4 * q + 4; ++tile)
          for (int slot = 8 * h; slot < 8 * h + 8; ++slot) found |= 1u << (chunk.row(tile, slot) % 32);
        banks += std::popcount(found);
        ++additions;
      }
  }
  EXPECT_GE(double(banks) / double(additions), 24);
}

TEST(CudaGroupsForm, TakesLittleMoreThanTheWeights) {
  const test::GroupedWeight w = test::grouped_weight(Id::gs4, 512, 4096, 1, {.group_size = 16, .sparsity = 0.5});
  const WeightView view = view_of(w);
  const PreparedGroups prepared = cuda::prepare_groups({&view, 1}, test::pool());
  // 8 bytes of codes, 2 of scale, 1 of row, half a byte of zero, a quarter of places; the end of a panel.
  EXPECT_LE(double(prepared.chunks.size()), 11.75 * double(w.params.kept_groups) * 1.005 + 2 * 1504);
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
