#include "kernels/e4m3_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/rng.h"

namespace lacuna::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Quantized {
  std::vector<e4m3> codes;
  std::vector<float> scale, projected;
};

Quantized quantize(const std::vector<float>& x, int64_t M, int64_t K, int64_t stride) {
  Quantized out{std::vector<e4m3>(size_t(M * K)), std::vector<float>(size_t(M)), std::vector<float>(size_t(M * K))};
  quantize_per_token(x.data(), stride, M, K, out.codes.data(), out.scale.data());
  project_per_token(x.data(), stride, M, K, out.projected.data());
  return out;
}

// A code of a normal value is within 2^-4 of what it stands for, relatively; below 2^-6 scales within half of 2^-9.
// The quotient and the inverse add a rounding of 2^-24 each.
TEST(E4m3Tokens, AreWithinHalfAStep) {
  for (const auto& [M, K] : {std::pair<int64_t, int64_t>{1, 1}, {1, 77}, {5, 129}, {77, 96}}) {
    const int64_t stride = K + 3;
    Rng rng(uint64_t(M * 1000 + K));
    std::vector<float> x(size_t(M * stride), kNan);  // what lies between the rows is not read
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; ++k)
        x[size_t(m * stride + k)] = float(rng.normal() * std::exp2(double(rng.below(40)) - 30));
    const Quantized q = quantize(x, M, K, stride);
    for (int64_t m = 0; m < M; ++m) {
      double most = 0;
      for (int64_t k = 0; k < K; ++k) most = std::max(most, double(std::abs(x[size_t(m * stride + k)])));
      EXPECT_EQ(q.scale[size_t(m)], float(most / 448));
      for (int64_t k = 0; k < K; ++k) {
        const double exact = x[size_t(m * stride + k)], scale = q.scale[size_t(m)];
        const double stored = scale * to_float(q.codes[size_t(m * K + k)]);
        EXPECT_LE(std::abs(stored - exact), std::max(std::abs(exact) * 0x1p-4, scale * 0x1p-10) * (1 + 0x1p-20));
        EXPECT_EQ(q.projected[size_t(m * K + k)], float(stored));
      }
    }
  }
}

// RECIPES 17.
TEST(E4m3Tokens, ZerosAndDenormalsAreSafe) {
  const std::vector<float> x = {0, 0, 0, -0.0f, 1e-40f, 0, -1e-40f, 5e-41f, 3e38f, -3e38f, 1, 0};
  const Quantized q = quantize(x, 3, 4, 4);
  for (const float value : q.projected) EXPECT_TRUE(std::isfinite(value));
  for (size_t k = 0; k < 4; ++k) EXPECT_EQ(q.projected[k], 0);
  EXPECT_EQ(q.scale[0], kLeastE4m3Scale);
  EXPECT_EQ(q.scale[1], kLeastE4m3Scale);
  EXPECT_NEAR(q.projected[4], 1e-40f, 0x1p-136) << "half a step of the least scale's subnormals";
  EXPECT_EQ(q.codes[8].bits, 0x7e);
  EXPECT_EQ(q.codes[9].bits, 0xfe);
}

// RECIPES 19 and 25: what is not finite shows in its own token and nowhere else.
TEST(E4m3Tokens, NanAndInfinityStayInTheirToken) {
  const std::vector<float> x = {1, kNan, 2, 1, kInf, 2, 1, 3, 2};
  const Quantized q = quantize(x, 3, 3, 3);
  EXPECT_EQ(q.scale[0], 2.0f / 448);
  EXPECT_TRUE(is_nan(q.codes[1]));
  EXPECT_FALSE(is_nan(q.codes[0]) || is_nan(q.codes[2]));
  EXPECT_EQ(q.scale[1], kInf);
  EXPECT_TRUE(is_nan(q.codes[4]));
  EXPECT_EQ(q.scale[2], 3.0f / 448);
  EXPECT_EQ(q.codes[7].bits, 0x7e);
}

// RECIPES 18.
TEST(E4m3Tokens, NoTokensNothingHappens) {
  quantize_per_token(nullptr, 0, 0, 16, nullptr, nullptr);
  project_per_token(nullptr, 0, 0, 16, nullptr);
}

}  // namespace
}  // namespace lacuna::kernels
