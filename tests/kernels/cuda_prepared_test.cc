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
  // Finite scales: zz8 has one before each 32 codes, the others one or two at the start or the end.
  const int64_t step = l.id == Id::zz8 ? 34 : l.block_bytes;
  for (size_t at = 0; at < bytes.size(); at += size_t(step)) {
    for (const int64_t place :
         l.id == Id::zz8 ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 2, step - 4, step - 2}) {
      const f16 scale = to_f16(float(rng.normal()));
      std::memcpy(&bytes[at + size_t(place)], &scale, 2);
    }
  }
  return bytes;
}

/// A weight read back by what prepared.h says.
class Reader {
 public:
  Reader(const cuda::PreparedGroup& group, int64_t r, int64_t k) {
    const cuda::ColumnForm& form = cuda::column_form(*group.layout);
    const int64_t column = r * group.K + k;
    id_ = group.layout->id;
    codes_ = reinterpret_cast<const uint8_t*>(group.codes.data() + column * form.code_bytes);
    header_ = reinterpret_cast<const uint8_t*>(group.headers.data() + column * form.header_bytes);
  }

  float value(int n) const {
    const int s = n / 16;
    switch (id_) {
      case Id::zz2_k:
        return scale(16) * float(header_[s] & 15) * float(half(0, 2, n) >> (n % 4 * 2) & 3) -
               scale(18) * float(header_[s] >> 4);
      case Id::zz3_k: {
        const int bits = (header_[s % 8] >> (s / 8 * 4) & 15) | (header_[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
        const int first = half(0, 2, n), last = half(64, 1, n);
        const int codes[] = {first & 7, first >> 3 & 7, (first >> 6 & 3) | (last >> 3 & 1) << 2, last & 7};
        return scale(12) * float(bits - 32) * float(codes[n % 4] - 4);
      }
      case Id::zz4_k:
        return affine(n, half(0, 4, n) >> (n % 4 * 4) & 15);
      case Id::zz5_k: {
        const int first = half(0, 4, n);
        return affine(n, n % 4 < 3 ? first >> (n % 4 * 5) & 31 : half(128, 1, n) | (first >> 15) << 4);
      }
      case Id::zz6_k: {
        const int first = half(0, 4, n), last = half(128, 2, n);
        const int codes[] = {first & 63, first >> 6 & 63, (last & 3) | first >> 12 << 2, last >> 2};
        return scale(16) * float(int8_t(header_[s])) * float(codes[n % 4] - 32);
      }
      default:  // zz8
        return scale(n / 32 * 2) * float(codes_[n / 8 * 8 + n % 4 / 2 * 4 + n % 8 / 4 * 2 + n % 2] - 128);
    }
  }

 private:
  float scale(int at) const {
    f16 v;
    std::memcpy(&v, header_ + at, 2);
    return to_float(v);
  }
  /// The half that output n lies in, of its lane's number of so many bytes in the plane that begins at `plane`.
  int half(int plane, int bytes, int n) const {
    uint32_t word = 0;
    std::memcpy(&word, codes_ + plane + n / 8 * bytes, size_t(bytes));
    return int(word >> (n % 8 / 4 * bytes * 4) & ((uint32_t{1} << (bytes * 4)) - 1));
  }
  float affine(int n, int code) const {
    const layout::ScaleMin packed = layout::unpack_six_bit(header_ + 4, n / 32);
    return scale(0) * float(packed.scale) * float(code) - scale(2) * float(packed.min);
  }

  Id id_;
  const uint8_t *codes_, *header_;
};

class CudaPreparedLayouts : public testing::TestWithParam<Id> {};

TEST_P(CudaPreparedLayouts, HoldTheWeightsOfEveryShapeAndTile) {
  const layout::Layout& l = layout::get(GetParam());
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
            const Reader column(group, r, k);
            for (int n = 0; n < 256 && r * 256 + n < N; ++n)
              ASSERT_EQ(column.value(n), w[size_t(n)]) << N << " " << K << " " << tile_rows << ", output " << n;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EachLayout, CudaPreparedLayouts,
                         testing::Values(Id::zz2_k, Id::zz3_k, Id::zz4_k, Id::zz5_k, Id::zz6_k, Id::zz8),
                         [](const auto& of) { return std::string(layout::get(of.param).name); });

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
  for (int n = 0; n < 64; ++n) ASSERT_EQ(Reader(group, 2, 39).value(n), w[size_t(n)]);
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
  EXPECT_NE(message({bad}).find("no kernel reads q4_K; those that one reads: zz2_k, zz3_k, zz4_k, zz5_k, zz6_k, zz8"),
            std::string::npos);
  EXPECT_NE(message({good, bad}).find("bad.weight: is q4_K, but good.weight is zz4_k"), std::string::npos);
  const layout::Layout& six = layout::get(Id::zz6_k);
  const auto third = random_bytes(six, shape, 1);
  const WeightView other_zigzag{"v.weight", &six, shape, third, {}, {}};
  EXPECT_NE(message({good, other_zigzag}).find("v.weight: is zz6_k, but good.weight is zz4_k"), std::string::npos);
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
