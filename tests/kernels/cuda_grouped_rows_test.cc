// tests/kernels/cuda_grouped_rows_test.cc - the CUDA row kernels over grouped rows (gq2 to gq8, bm2 to bm16, nm24_q4)
// against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda_memory.h"
#include "kernels/cuda_rows.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using layout::Id;
using test::device;
using test::OnDevice;
using test::stream;

struct Case {
  Id id;
  int64_t g, K;
};
std::vector<Case> cases() {
  std::vector<Case> out;
  for (const Id id : {Id::gq2, Id::gq3, Id::gq4, Id::gq8, Id::bm2, Id::bm3, Id::bm4, Id::bm8, Id::bm16})
    for (const int64_t g : {0, 16, 48, 128})
      for (const int64_t K : {1, 300, 576, 2051}) out.push_back({id, g, K});
  for (const int64_t K : {64, 576, 4096}) out.push_back({Id::nm24_q4, 64, K});
  return out;
}

struct OnCard {
  test::GroupedWeight w;
  OnDevice<std::byte> bytes;

  OnCard(const Case& c, int64_t N, uint64_t seed)
      : w(test::grouped_weight(c.id, N, c.K, seed, {.group_size = c.g, .sparsity = 0.5, .whole_zeros = false})),
        bytes(prepare(w)) {}
  static std::vector<std::byte> prepare(const test::GroupedWeight& w) {
    std::vector<std::byte> out(size_t(w.shape.N * cuda::row_places(*w.layout, w.shape.K, w.params).row_bytes));
    cuda::prepare_rows(*w.layout, w.shape, w.params, w.bytes, test::pool(), out.data());
    return out;
  }
  cuda::Rows rows() const { return {w.layout, bytes.data(), w.shape.N, w.shape.K, w.params}; }
};

TEST(CudaGroupedRows, ProductsMatchDouble) {
  LACUNA_NEED_DEVICE();
  for (const Case& c : cases()) {
    if (test::emulated() && c.K > 600) continue;
    const OnCard a(c, 77, 1), b(c, 30, 2);
    Rng rng(3);
    std::vector<float> x(size_t(c.K)), bias(77);
    for (float& v : x) v = float(rng.normal());
    for (float& v : bias) v = float(rng.normal());
    const OnDevice<float> on_x(x), on_bias(bias), y(77), z(30);
    const cuda::RowsPart parts[] = {{a.rows(), on_bias.data(), y.data()}, {b.rows(), nullptr, z.data()}};
    cuda::launch_rows(device(), stream(), {parts, on_x.data()});
    for (const auto* const part : {&a, &b}) {
      const std::vector<float> got = (part == &a ? y : z).values();
      for (int64_t n = 0; n < part->w.shape.N; ++n) {
        double exact = part == &a ? double(bias[size_t(n)]) : 0, through = std::fabs(exact);
        for (int64_t k = 0; k < c.K; ++k) {
          const auto i = size_t(n * c.K + k);
          exact += double(part->w.decoded[i]) * double(x[size_t(k)]);
          // Codes pass through the sums with 2^bits added to them.
          through += 2 * double(part->w.largest[i]) * std::fabs(double(x[size_t(k)]));
        }
        ASSERT_LE(std::fabs(double(got[size_t(n)]) - exact), 0x1p-23 * (double(c.K) / 32 + 32) * through + 1e-12)
            << part->w.layout->name << " g" << c.g << " K " << c.K << " output " << n;
      }
    }
  }
}

TEST(CudaGroupedRows, ProductsOfAFewTokensMatchDouble) {
  LACUNA_NEED_DEVICE();
  for (const Case& c : cases()) {
    if (test::emulated() && (c.K > 600 || c.g == 48)) continue;
    const OnCard a(c, 77, 1), b(c, 30, 2);
    Rng rng(3);
    const int64_t x_stride = (c.K + 7) / 4 * 4, y_stride = 110;
    std::vector<float> x(size_t(4 * x_stride)), bias(77);
    for (float& v : x) v = float(rng.normal());
    for (float& v : bias) v = float(rng.normal());
    const OnDevice<float> on_x(x), on_bias(bias);
    for (const int64_t M : {2, 3, 4}) {
      const OnDevice<float> y(size_t(4 * y_stride));
      const cuda::RowsPart parts[] = {{a.rows(), on_bias.data(), y.data()}, {b.rows(), nullptr, y.data() + 77}};
      launch_rows(parts, on_x, M, x_stride, y_stride);
      const std::vector<float> got = y.values();
      for (int64_t m = 0; m < 4; ++m)
        for (int64_t n = 0; n < y_stride; ++n) {
          const float v = got[size_t(m * y_stride + n)];
          if (m >= M || n >= 107) {
            ASSERT_TRUE(std::isnan(v)) << "written where nothing is";
            continue;
          }
          const OnCard& part = n < 77 ? a : b;
          const int64_t row = n < 77 ? n : n - 77;
          double exact = n < 77 ? double(bias[size_t(n)]) : 0, through = std::fabs(exact);
          for (int64_t k = 0; k < c.K; ++k) {
            const auto i = size_t(row * c.K + k);
            const auto input = double(x[size_t(m * x_stride + k)]);
            exact += double(part.w.decoded[i]) * input;
            through += 2 * double(part.w.largest[i]) * std::fabs(input);  // as in ProductsMatchDouble
          }
          ASSERT_LE(std::fabs(double(v) - exact), 0x1p-23 * (double(c.K) / 32 + 32) * through + 1e-12)
              << part.w.layout->name << " g" << c.g << " K " << c.K << " token " << m << " of " << M << " output " << n;
        }
    }
  }
}

TEST(CudaGroupedRows, MoreThanAFewTokensAreRefused) {
  LACUNA_NEED_DEVICE();
  cuda::RowsArgs args;
  args.M = cuda::kMostFewRows + 1;
  EXPECT_THROW(cuda::launch_rows(device(), stream(), args), Error);
}

TEST(CudaGroupedRows, EmbeddingsAreTheBitsOfTheLayout) {
  LACUNA_NEED_DEVICE();
  for (const Case& c : cases()) {
    const OnCard a(c, 9, 1);
    const OnDevice<int32_t> ids(std::vector<int32_t>{8, 0, 3});
    const OnDevice<float> out(size_t(3 * c.K));
    cuda::launch_embed(device(), stream(), a.rows(), ids.data(), 3, out.data());
    const std::vector<float> got = out.values();
    for (const auto& [at, row] : {std::pair<size_t, size_t>{0, 8}, {1, 0}, {2, 3}})
      for (size_t k = 0; k < size_t(c.K); ++k) {
        const float v = got[at * size_t(c.K) + k], want = a.w.decoded[row * size_t(c.K) + k];
        ASSERT_TRUE(c.id == Id::nm24_q4 ? v == want : std::memcmp(&v, &want, 4) == 0)
            << a.w.layout->name << " g" << c.g << " K " << c.K << " k " << k << ": " << v << ", not " << want;
      }
  }
}

TEST(CudaGroupedRows, OperandsHoldTheWeights) {
  LACUNA_NEED_DEVICE();
  for (const Case& c : cases()) {
    if (test::emulated() && c.K > 600) continue;
    const int64_t N = test::emulated() ? 20 : 140;
    const OnCard a(c, N, 1);
    const OnDevice<float> scale(static_cast<size_t>(N));
    cuda::launch_weight_scales(device(), stream(), a.rows(), scale.data());
    const int64_t tiles = (c.K + 63) / 64;
    const OnDevice<std::byte> operand(size_t(cuda::operand_bytes(N, c.K)));
    cuda::launch_gemm_weights(device(), stream(), a.rows(), 0, {operand.data(), scale.data(), N, c.K});
    const std::vector<std::byte> bytes = operand.values();
    const std::vector<float> scales = scale.values();
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < tiles * 64; ++k) {
        f16 half;
        const int64_t piece = k % 64 / 8, tile = n / 128 * tiles + k / 64;
        std::memcpy(&half, &bytes[size_t(tile * 16384 + n % 128 * 128 + (piece ^ (n % 8)) * 16 + k % 8 * 2)], 2);
        const float want = k < c.K ? a.w.decoded[size_t(n * c.K + k)] : 0, got = to_float(half) * scales[size_t(n)];
        ASSERT_LE(std::fabs(got - want), std::fabs(want) * 0x1p-11f + 1e-12f)
            << a.w.layout->name << " g" << c.g << " [" << n << ", " << k << "]";
      }
  }
}

}  // namespace
}  // namespace lacuna
