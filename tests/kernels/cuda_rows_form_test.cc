// tests/kernels/cuda_rows_form_test.cc - the prepared form of row layouts, read back as rows.h describes it.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cuda/rows.h"
#include "layout/layout.h"

namespace lacuna {
namespace {

using layout::Id;

/// One prepared row.
struct Row {
  const std::byte* bytes;
  cuda::RowPlaces places;

  uint32_t byte(int plane, int64_t at) const { return uint32_t(bytes[places.plane[plane] + at]); }
  float half(int plane, int64_t entry) const {
    f16 h;
    std::memcpy(&h, bytes + places.plane[plane] + 2 * entry, 2);
    return to_float(h);
  }
  uint32_t nibble(int plane, int64_t unit, int w) const { return byte(plane, 16 * unit + w % 16) >> (w / 16 * 4) & 15; }
  /// `bits` bits of weight w.
  uint32_t high(int plane, int64_t unit, int w, int bits) const {
    const int groups = 8 / bits, t = w / 4;
    return byte(plane, 4 * bits * unit + t / groups * 4 + w % 4) >> (t % groups * bits) & ((1u << bits) - 1);
  }
  /// Scale and minimum of q4_K and q5_K: d, dmin, then 6 bits each as layout/six_bit.h packs them.
  std::array<float, 2> six_bit(int plane, int64_t unit) const {
    const int64_t at = 16 * (unit / 8) + 4, s = unit % 8;
    const auto b = [&](int64_t i) { return byte(plane, at + i); };
    const uint32_t scale = s < 4 ? b(s) & 63 : (b(s + 4) & 15) | b(s - 4) >> 6 << 4;
    const uint32_t min = s < 4 ? b(s + 4) & 63 : b(s + 4) >> 4 | b(s) >> 6 << 4;
    return {half(plane, 8 * (unit / 8)) * float(scale), half(plane, 8 * (unit / 8) + 1) * float(min)};
  }
  float weight(Id id, int64_t k) const {
    const int64_t u = k / 32;
    const int w = int(k % 32);
    const auto signed_byte = [&](int plane, int64_t at) { return float(int8_t(byte(plane, at))); };
    switch (id) {
      case Id::q4_0:
        return (float(nibble(0, u, w)) - 8) * half(1, u);
      case Id::q4_1:
        return float(nibble(0, u, w)) * half(1, 2 * u) + half(1, 2 * u + 1);
      case Id::q5_0:
        return (float(nibble(0, u, w) | high(1, u, w, 1) << 4) - 16) * half(2, u);
      case Id::q5_1:
        return float(nibble(0, u, w) | high(1, u, w, 1) << 4) * half(2, 2 * u) + half(2, 2 * u + 1);
      case Id::q8_0:
        return signed_byte(w / 16, 16 * u + w % 16) * half(2, u);
      case Id::q2_K: {
        const uint32_t scales = byte(1, 2 * u + w / 16);
        const float scale = half(2, 2 * (u / 8)) * float(scales & 15),
                    min = half(2, 2 * (u / 8) + 1) * float(scales >> 4);
        return scale * float(high(0, u, w, 2)) - min;
      }
      case Id::q3_K:
        return half(3, u / 8) * signed_byte(2, 2 * u + w / 16) * (float(high(0, u, w, 2) | high(1, u, w, 1) << 2) - 4);
      case Id::q4_K: {
        const auto [scale, min] = six_bit(1, u);
        return scale * float(nibble(0, u, w)) - min;
      }
      case Id::q5_K: {
        const auto [scale, min] = six_bit(2, u);
        return scale * float(nibble(0, u, w) | high(1, u, w, 1) << 4) - min;
      }
      case Id::q6_K:
        return half(3, u / 8) * signed_byte(2, 2 * u + w / 16) * (float(nibble(0, u, w) | high(1, u, w, 2) << 4) - 32);
      case Id::f16:
        return half(0, k);
      case Id::bf16: {
        bf16 b;
        std::memcpy(&b, bytes + 2 * k, 2);
        return to_float(b);
      }
      default: {
        float f;
        std::memcpy(&f, bytes + 4 * k, 4);
        return f;
      }
    }
  }
};

class CudaRowsForm : public testing::TestWithParam<Id> {};
INSTANTIATE_TEST_SUITE_P(Layouts, CudaRowsForm,
                         testing::Values(Id::f32, Id::f16, Id::bf16, Id::q4_0, Id::q4_1, Id::q5_0, Id::q5_1, Id::q8_0,
                                         Id::q2_K, Id::q3_K, Id::q4_K, Id::q5_K, Id::q6_K),
                         [](const auto& test) { return std::string(layout::get(test.param).name); });

TEST_P(CudaRowsForm, HoldsTheWeightsOfTheCanonicalRows) {
  const layout::Layout& l = layout::get(GetParam());
  ThreadPool pool(2);
  Rng rng(5);
  for (const int64_t blocks : {1, 3, 8, 33}) {
    const int64_t N = 70, K = blocks * l.block_cols;
    std::vector<std::byte> bytes(size_t(l.size_bytes({N, K})));
    // Every 16-bit half is finite and below 2, so that scales are, wherever they lie; its lower bits are random.
    for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
      const auto bits = uint16_t(rng.next() & 0xbbff);
      std::memcpy(&bytes[i], &bits, 2);
    }
    const cuda::RowPlaces places = cuda::row_places(l, K);
    ASSERT_EQ(places.row_bytes % 16, 0);
    ASSERT_GE(places.row_bytes, l.row_bytes(K));
    std::vector<std::byte> prepared(size_t(N * places.row_bytes), std::byte{0xaa});
    cuda::prepare_rows(l, {N, K}, {}, bytes, pool, prepared.data());
    std::vector<float> expected(size_t(N * K));
    layout::decode_rows(l, {N, K}, bytes, 0, N, expected.data());
    for (int64_t n = 0; n < N; ++n) {
      const Row row{prepared.data() + n * places.row_bytes, places};
      for (int64_t k = 0; k < K; ++k) {
        const float got = row.weight(l.id, k), want = expected[size_t(n * K + k)];
        ASSERT_EQ(std::memcmp(&got, &want, 4), 0) << "row " << n << " column " << k << ": " << got << ", not " << want;
      }
    }
  }
}

// Grouped rows, any K: the last unit and the last group may be shorter.
TEST(CudaRowsFormOf, GroupedRowsHoldTheWeights) {
  ThreadPool pool(2);
  for (const Id id : {Id::gq2, Id::gq3, Id::gq4, Id::gq8, Id::nm24_q4, Id::bm2, Id::bm3, Id::bm4, Id::bm8, Id::bm16}) {
    for (const int64_t g : {0, 16, 48, 128}) {
      for (const int64_t K : {1, 64, 300, 576}) {
        if (id == Id::nm24_q4 && K % 64 != 0) continue;
        const test::GroupedWeight w =
            test::grouped_weight(id, 5, K, 3, {.group_size = g, .sparsity = 0.5, .whole_zeros = false});
        const int bits = w.layout->bits;
        const bool masked = w.layout->family == layout::Family::bitmask;
        const cuda::RowPlaces places = cuda::row_places(*w.layout, K, w.params);
        std::vector<std::byte> prepared(size_t(5 * places.row_bytes), std::byte{0xaa});
        cuda::prepare_rows(*w.layout, w.shape, w.params, w.bytes, pool, prepared.data());
        const int64_t size = id == Id::nm24_q4 ? 64 : layout::whole_group(K, g);
        for (int64_t n = 0; n < 5; ++n) {
          const Row row{prepared.data() + n * places.row_bytes, places};
          for (int64_t k = 0; k < K; ++k) {
            const int64_t u = k / 32, i = k / size;
            const int at = int(k % 32);
            const float want = w.decoded[size_t(n * K + k)];
            if (bits == 16) {
              ASSERT_EQ(row.half(0, k), want);
              continue;
            }
            ASSERT_EQ(int64_t(cuda::group_of(uint32_t(k / 16), places.group_factor)), i);
            if (masked && (row.byte(cuda::kMaskPlane, 4 * u + at / 8) >> (at % 8) & 1) == 0) {
              ASSERT_EQ(want, 0);
              continue;
            }
            const uint32_t code = bits == 2   ? row.high(0, u, at, 2)
                                  : bits == 3 ? row.high(0, u, at, 2) | row.high(1, u, at, 1) << 2
                                  : bits == 8 ? row.byte(at / 16, 16 * u + at % 16)
                                              : row.nibble(0, u, at);
            const float got =
                row.half(cuda::kGroupPlane, 2 * i) * (float(code) - row.half(cuda::kGroupPlane, 2 * i + 1));
            ASSERT_EQ(got, want) << w.layout->name << " g" << g << " K " << K << " k " << k;
          }
        }
      }
    }
  }
}

TEST(CudaRowsFormOf, GroupsThatNoKernelReadsAreRefused) {
  EXPECT_THROW(cuda::row_places(layout::get(Id::gq4), 64, {.group_size = 24}), Error);
  EXPECT_NO_THROW(cuda::row_places(layout::get(Id::gq4), 64, {.group_size = 72}));  // the whole row
  EXPECT_THROW(cuda::row_places(layout::get(Id::gs4), 64, {.group_size = 32}), Error);
}

TEST(CudaRowsFormOf, RefusesZigzagLayouts) {
  EXPECT_THROW(cuda::row_form(layout::get(Id::zz4_k)), Error);
  EXPECT_THROW(cuda::row_places(layout::get(Id::zz8), 256), Error);
}

}  // namespace
}  // namespace lacuna
