// Statistics of columns and X^T X on a CUDA device, against double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/column_statistics.h"
#include "kernels/cuda_memory.h"

namespace lacuna {
namespace {

using test::device;
using test::emulated;
using test::OnDevice;
using test::stream;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Tokens of normal inputs, each input of a size of its own; what pads rows is NaN.
struct Tokens {
  int64_t M, K, stride;
  std::vector<bf16> x;

  Tokens(int64_t tokens, int64_t inputs, uint64_t seed) : M(tokens), K(inputs), stride((inputs + 7) / 8 * 8 + 8) {
    Rng rng(seed);
    x.assign(size_t(M * stride), to_bf16(std::numeric_limits<float>::quiet_NaN()));
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; ++k)
        x[size_t(m * stride + k)] = to_bf16(float(std::ldexp(rng.normal(), int(k % 7) - 3) + double(k % 3)));
  }
  double at(int64_t m, int64_t k) const { return to_float(x[size_t(m * stride + k)]); }
  cuda::ColumnInputs on(const OnDevice<bf16>& memory) const { return {memory.data(), M, K, stride}; }
};

std::vector<Tokens> batches(int64_t K) {
  const int64_t many = emulated() ? 270 : K > 100 ? 600 : 4609;
  return {Tokens(1, K, 1), Tokens(5, K, 2), Tokens(many, K, 3)};
}
std::vector<int64_t> widths() {
  if (emulated()) return {1, 31, 130};
  return {1, 31, 64, 65, 3072, 15361};
}

struct Sums {
  OnDevice<double> squares;
  OnDevice<float> least, most;
  explicit Sums(int64_t K)
      : squares(std::vector<double>(size_t(K))),
        least(std::vector<float>(size_t(K), kInfinity)),
        most(std::vector<float>(size_t(K), -kInfinity)) {}
  cuda::ColumnSums on() const { return {squares.data(), least.data(), most.data()}; }
};

TEST(CudaColumnStatistics, SumsAndRanges) {
  LACUNA_NEED_DEVICE();
  for (const int64_t K : widths()) {
    const Sums sums(K), again(K);
    std::vector<double> squares(static_cast<size_t>(K));
    std::vector<float> least(size_t(K), kInfinity), most(size_t(K), -kInfinity);
    int64_t tokens = 0;
    for (const Tokens& batch : batches(K)) {
      const OnDevice<bf16> x(batch.x);
      for (const Sums* to : {&sums, &again}) cuda::launch_column_sums(device(), stream(), batch.on(x), to->on());
      stream().synchronize();
      tokens += batch.M;
      for (int64_t m = 0; m < batch.M; ++m)
        for (int64_t k = 0; k < K; ++k) {
          const double value = batch.at(m, k);
          squares[size_t(k)] += value * value;
          least[size_t(k)] = std::min(least[size_t(k)], float(value));
          most[size_t(k)] = std::max(most[size_t(k)], float(value));
        }
    }
    EXPECT_EQ(sums.least.values(), least) << K;
    EXPECT_EQ(sums.most.values(), most) << K;
    const std::vector<double> got = sums.squares.values();
    EXPECT_EQ(again.squares.values(), got) << K;
    // Squares are exact and positive: each sum rounds as often as it has terms, ours and the one that it is held to.
    for (size_t k = 0; k < size_t(K); ++k)
      ASSERT_NEAR(got[k], squares[k], 2 * double(tokens) * 0x1p-53 * squares[k]) << K << ' ' << k;
  }
}

/// As calibrate::ColumnStatistics.
int bin_of(float value, float least, float most) {
  const double width = double(most) - double(least);
  if (!(width > 0)) return 0;
  const int bin = int((double(value) - double(least)) / width * cuda::kColumnBins);
  return std::clamp(bin, 0, cuda::kColumnBins - 1);
}

TEST(CudaColumnStatistics, CountsFallInTheBinsOfTheRanges) {
  LACUNA_NEED_DEVICE();
  for (const int64_t K : widths()) {
    Rng rng(7);
    std::vector<float> least, most;  // narrower than the values
    for (int64_t k = 0; k < K; ++k) {
      least.push_back(to_float(to_bf16(float(-1 - rng.uniform()))));
      most.push_back(k % 5 == 4 ? least.back() : to_float(to_bf16(float(1 + rng.uniform()))));  // or of no width
    }
    const OnDevice<float> lows(least), highs(most);
    const OnDevice<uint32_t> counts(std::vector<uint32_t>(size_t(K * cuda::kColumnBins)));
    std::vector<uint32_t> expected(size_t(K * cuda::kColumnBins));
    for (const Tokens& batch : batches(K)) {
      const OnDevice<bf16> x(batch.x);
      cuda::launch_column_counts(device(), stream(), batch.on(x), lows.data(), highs.data(), counts.data());
      stream().synchronize();
      for (int64_t m = 0; m < batch.M; ++m)
        for (int64_t k = 0; k < K; ++k)
          ++expected[size_t(k * cuda::kColumnBins + bin_of(float(batch.at(m, k)), least[size_t(k)], most[size_t(k)]))];
    }
    EXPECT_EQ(counts.values(), expected) << K;
  }
}

TEST(CudaColumnStatistics, SecondMoments) {
  LACUNA_NEED_DEVICE();
  for (const int64_t K : emulated() ? std::vector<int64_t>{1, 31, 130} : std::vector<int64_t>{1, 31, 64, 65, 700}) {
    const auto values = size_t(K * (K + 1) / 2);
    const OnDevice<double> sums{std::vector<double>(values)}, again{std::vector<double>(values)};
    std::vector<double> expected(values), sizes(values);
    for (const Tokens& batch : batches(K)) {
      const OnDevice<bf16> x(batch.x);
      for (const OnDevice<double>* to : {&sums, &again})
        cuda::launch_second_moment(device(), stream(), batch.on(x), to->data());
      stream().synchronize();
      for (int64_t m = 0; m < batch.M; ++m)
        for (int64_t i = 0, at = 0; i < K; ++i)
          for (int64_t j = i; j < K; ++j, ++at) {
            const double product = batch.at(m, i) * batch.at(m, j);
            expected[size_t(at)] += product;
            sizes[size_t(at)] += std::abs(product);
          }
    }
    const std::vector<double> got = sums.values();
    EXPECT_EQ(again.values(), got) << K;
    // Products of two bf16 are exact; float32 sums have 256 terms, which double ones of that error are made of.
    for (size_t at = 0; at < values; ++at)
      ASSERT_NEAR(got[at], expected[at], 257 * 0x1p-24 * sizes[at]) << K << ' ' << at;
  }
}

// FLUX.1's widest input, of 1024 x 1024 pixels, in samples.
TEST(CudaColumnStatistics, LargeSecondMoment) {
  LACUNA_NEED_DEVICE();
  if (emulated()) GTEST_SKIP() << "SKIPPED: 10^12 operations take hours where kernels run on the CPU";
  constexpr int64_t kInputs = 15360;
  const Tokens batch(4608, kInputs, 1);
  const OnDevice<bf16> x(batch.x);
  const OnDevice<double> sums{std::vector<double>(size_t(kInputs * (kInputs + 1) / 2))};
  cuda::launch_second_moment(device(), stream(), batch.on(x), sums.data());
  const std::vector<double> got = sums.values();
  Rng rng(2);
  for (int sample = 0; sample < 1000; ++sample) {
    const auto a = int64_t(rng.uniform() * kInputs), b = sample % 10 == 0 ? a : int64_t(rng.uniform() * kInputs);
    const int64_t i = std::min(a, b), j = std::max(a, b);
    double expected = 0, size = 0;
    for (int64_t m = 0; m < batch.M; ++m) {
      expected += batch.at(m, i) * batch.at(m, j);
      size += std::abs(batch.at(m, i) * batch.at(m, j));
    }
    ASSERT_NEAR(got[size_t(i * kInputs - i * (i - 1) / 2 + j - i)], expected, 257 * 0x1p-24 * size) << i << ' ' << j;
  }
}

TEST(CudaColumnStatistics, WhatIsNotFiniteShows) {
  LACUNA_NEED_DEVICE();
  Tokens batch(3, 4, 1);
  batch.x[1] = to_bf16(kInfinity);
  batch.x[size_t(batch.stride) + 2] = to_bf16(std::numeric_limits<float>::quiet_NaN());
  const OnDevice<bf16> x(batch.x);
  const Sums sums(4);
  cuda::launch_column_sums(device(), stream(), batch.on(x), sums.on());
  const std::vector<double> squares = sums.squares.values();
  for (size_t k = 0; k < 4; ++k) EXPECT_EQ(std::isfinite(squares[k]), k == 0 || k == 3) << k;
}

TEST(CudaColumnStatistics, RefusesRowsThatAreNotAligned) {
  LACUNA_NEED_DEVICE();
  const Tokens batch(4, 7, 1);
  const OnDevice<bf16> x(batch.x);
  const OnDevice<double> moment(28);
  const Sums sums(7);
  const cuda::ColumnInputs odd{x.data(), 4, 7, 9}, narrow{x.data(), 4, 7, 6}, between{x.data() + 1, 3, 7, 16};
  for (const cuda::ColumnInputs& inputs : {odd, narrow, between}) {
    EXPECT_THROW(cuda::launch_column_sums(device(), stream(), inputs, sums.on()), Error);
    EXPECT_THROW(cuda::launch_second_moment(device(), stream(), inputs, moment.data()), Error);
  }
}

}  // namespace
}  // namespace lacuna
