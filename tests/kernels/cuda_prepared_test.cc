// tests/kernels/cuda_prepared_test.cc - the form of the weights that CUDA kernels read, and how work is shared out. No
// device needed.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda/share.h"
#include "kernels/support.h"
#include "layout/six_bit.h"
#include "layout/zigzag.h"

namespace lacuna {
namespace {

using kernels::WeightView;
using layout::Id;
using layout::Shape;

std::vector<std::byte> random_bytes(const layout::Layout& l, Shape shape, uint64_t seed) {
  std::vector<std::byte> bytes(size_t(l.size_bytes(shape)));
  Rng rng(seed);
  for (std::byte& byte : bytes) byte = std::byte(rng.next() >> 56);
  for (size_t at = 0; at < bytes.size(); at += size_t(l.block_bytes)) {  // finite scales
    const f16 d = to_f16(float(rng.normal())), dmin = to_f16(float(rng.normal()));
    std::memcpy(&bytes[at], &d, 2);
    std::memcpy(&bytes[at + 2], &dmin, 2);
  }
  return bytes;
}

/// A weight of zz4_k read back by what prepared.h says.
float value_zz4_k(const cuda::PreparedGroup& group, int64_t r, int64_t k, int n) {
  const int64_t column = r * group.K + k;
  const auto* header = reinterpret_cast<const uint8_t*>(group.headers.data() + column * 16);
  f16 d, dmin;
  std::memcpy(&d, header, 2);
  std::memcpy(&dmin, header + 2, 2);
  const layout::ScaleMin packed = layout::unpack_six_bit(header + 4, n / 32);
  uint32_t word;
  std::memcpy(&word, group.codes.data() + column * 128 + n / 8 * 4, 4);
  const float scale = to_float(d) * float(packed.scale), min = to_float(dmin) * float(packed.min);
  return scale * float(word >> (4 * (n % 8)) & 15) - min;
}

TEST(CudaPrepared, HoldsTheWeightsOfEveryShapeAndTile) {
  const layout::Layout& l = layout::get(Id::zz4_k);
  for (const int64_t N : {1, 255, 256, 257, 1000}) {
    for (const int64_t K : {1, 17, 600}) {
      for (const int64_t tile_rows : {0, 256, 512}) {
        const Shape shape{N, K};
        const std::vector<std::byte> bytes = random_bytes(l, shape, uint64_t(N + K));
        const WeightView view{"w", &l, shape, bytes, {}, {tile_rows}};
        const cuda::PreparedGroup group = cuda::prepare_group({&view, 1}, test::pool());
        ASSERT_EQ(group.rows, layout::super_rows(N));
        ASSERT_EQ(group.K, K);
        std::vector<float> w(256);
        for (int64_t r = 0; r < group.rows; ++r) {
          for (int64_t k = 0; k < K; ++k) {
            layout::decode_zigzag_superblock(l, shape, {tile_rows}, bytes, r, k, w.data());
            for (int n = 0; n < 256 && r * 256 + n < N; ++n)
              ASSERT_EQ(value_zz4_k(group, r, k, n), w[size_t(n)]) << N << " " << K << " " << tile_rows;
          }
        }
      }
    }
  }
}

TEST(CudaPrepared, PartsFollowEachOtherInWholeSuperblockRows) {
  const layout::Layout& l = layout::get(Id::zz4_k);
  const Shape a{300, 40}, b{64, 40};
  const auto first = random_bytes(l, a, 1), second = random_bytes(l, b, 2);
  const WeightView views[] = {{"a", &l, a, first, {}, {}}, {"b", &l, b, second, {}, {256}}};
  const cuda::PreparedGroup group = cuda::prepare_group(views, test::pool());
  EXPECT_EQ(group.rows, 3);
  EXPECT_EQ(group.first_output, (std::vector<int64_t>{0, 512}));
  std::vector<float> w(256);
  layout::decode_zigzag_superblock(l, b, {256}, second, 0, 39, w.data());
  for (int n = 0; n < 64; ++n) ASSERT_EQ(value_zz4_k(group, 2, 39, n), w[size_t(n)]);
}

TEST(CudaPrepared, RefusesWhatNoKernelReads) {
  const layout::Layout &zigzag = layout::get(Id::zz4_k), &rows = layout::get(Id::q4_K);
  const Shape shape{256, 256};
  const auto bytes = random_bytes(zigzag, shape, 1), other = random_bytes(rows, shape, 1);
  const WeightView good{"good.weight", &zigzag, shape, bytes, {}, {}}, bad{"bad.weight", &rows, shape, other, {}, {}};
  const auto message = [](std::vector<WeightView> views) {
    try {
      cuda::prepare_group(views, test::pool());
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({bad}).find("no kernel reads q4_K; those that one reads: zz4_k"), std::string::npos);
  EXPECT_NE(message({good, bad}).find("bad.weight: is q4_K, but good.weight is zz4_k"), std::string::npos);
}

// The paper's Figure 6: nine active entries over n1 x n2 = 3 workers are three each.
TEST(CudaShare, FigureSixGivesEachWorkerThree) {
  for (uint32_t i = 0; i <= 3; ++i) EXPECT_EQ(cuda::share_begin(9, i, 3, cuda::share_factor(3)), 3 * i);
}

TEST(CudaShare, IsEvenAndComplete) {
  for (const uint32_t parts : {2u, 3u, 4u, 7u, 32u, 96u, 132u, 392u, 2048u}) {
    const uint32_t factor = cuda::share_factor(parts);
    for (const uint32_t count : {0u, 1u, 15u, 16u, 17u, 1000u, 4095u, 28672u, 262144u}) {
      uint32_t last = 0;
      EXPECT_EQ(cuda::share_begin(count, 0, parts, factor), 0u);
      for (uint32_t i = 1; i <= parts; ++i) {
        const uint32_t begin = cuda::share_begin(count, i, parts, factor);
        ASSERT_GE(begin, last);
        ASSERT_LE(begin - last, count / parts + 2) << count << " " << parts;
        if (uint64_t{count} * i * parts < (uint64_t{1} << 32)) {
          ASSERT_EQ(begin, uint64_t{count} * i / parts);
        }
        last = begin;
      }
      EXPECT_EQ(last, count);
    }
  }
}

}  // namespace
}  // namespace lacuna
