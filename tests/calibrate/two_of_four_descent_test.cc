// Against a double-precision evaluation of AWP's Algorithm 1, row by row.
#include "calibrate/two_of_four_descent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/rng.h"
#include "layout/two_of_four.h"

namespace lacuna::calibrate {
namespace {

using Row = std::vector<double>;

struct Answer {
  std::vector<uint8_t> keep;
  std::vector<float> theta;
};

ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

Answer descend(const std::vector<float>& w, const std::vector<float>& C) {
  Answer out{std::vector<uint8_t>(w.size(), 7), std::vector<float>(w.size(), NAN)};
  descend_two_of_four(w, C, out.keep, out.theta, pool());
  return out;
}

/// The second moment of `tokens` inputs that share a few directions.
std::vector<float> correlated(int64_t K, int64_t tokens, uint64_t seed) {
  Rng rng(seed);
  std::vector<double> mix(static_cast<size_t>(3 * K));
  for (double& value : mix) value = rng.normal();
  std::vector<double> sum(size_t(K * K));
  for (int64_t m = 0; m < tokens; ++m) {
    const double a[] = {rng.normal(), rng.normal(), rng.normal()};
    Row x(static_cast<size_t>(K));
    for (int64_t k = 0; k < K; ++k) {
      x[size_t(k)] = rng.normal();
      for (int64_t d = 0; d < 3; ++d) x[size_t(k)] += a[d] * mix[size_t(d * K + k)];
    }
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < K; ++j) sum[size_t(i * K + j)] += x[size_t(i)] * x[size_t(j)];
  }
  std::vector<float> out(sum.size());
  std::transform(sum.begin(), sum.end(), out.begin(), [&](double value) { return float(value / double(tokens)); });
  return out;
}

std::vector<float> normal(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = float(rng.normal());
  return out;
}

/// Indices of the two largest of every four, by sorting.
std::vector<uint8_t> two_largest(const Row& score) {
  std::vector<uint8_t> keep(score.size(), 0);
  for (size_t k = 0; k < score.size(); k += 4) {
    std::vector<size_t> order(std::min<size_t>(4, score.size() - k));
    std::iota(order.begin(), order.end(), k);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return score[a] > score[b]; });
    for (size_t i = 0; i < std::min<size_t>(2, order.size()); ++i) keep[order[i]] = 1;
  }
  return keep;
}

double quadratic(const Row& d, const std::vector<float>& C) {
  double sum = 0;
  for (size_t i = 0; i < d.size(); ++i)
    for (size_t j = 0; j < d.size(); ++j) sum += d[i] * double(C[i * d.size() + j]) * d[j];
  return sum;
}

double loss(std::span<const float> w, const Row& theta, const std::vector<float>& C) {
  Row d(theta.size());
  for (size_t k = 0; k < d.size(); ++k) d[k] = double(w[k]) - theta[k];
  return quadratic(d, C);
}

struct Reference {
  std::vector<uint8_t> keep;
  Row theta, wanda;
  int iterations = 0;
};

Reference reference(std::span<const float> w, const std::vector<float>& C) {
  const size_t K = w.size();
  double size = 0, w_size = 0;
  for (const float value : C) size += double(value) * double(value);
  for (const float value : w) w_size += double(value) * double(value);
  const double eta = size > 0 ? 2 / std::sqrt(size) : 0;
  Reference out;
  Row score(K);
  for (size_t k = 0; k < K; ++k) score[k] = std::abs(double(w[k])) * std::sqrt(double(C[k * K + k]));
  out.keep = two_largest(score);
  out.theta.resize(K);
  for (size_t k = 0; k < K; ++k) out.theta[k] = out.keep[k] != 0 ? double(w[k]) : 0;
  out.wanda = out.theta;
  for (; out.iterations < 200; ++out.iterations) {
    Row step(K, 0.0);
    double step_size = 0;
    for (size_t j = 0; j < K; ++j) {
      for (size_t k = 0; k < K; ++k) step[j] += (double(w[k]) - out.theta[k]) * double(C[k * K + j]);
      step_size += step[j] * step[j];
    }
    if (step_size == 0 || 2 * std::sqrt(step_size) < 1e-4 * std::sqrt(w_size)) break;
    Row z(K);
    for (size_t k = 0; k < K; ++k) z[k] = out.theta[k] + eta * step[k], score[k] = std::abs(z[k]);
    out.keep = two_largest(score);
    for (size_t k = 0; k < K; ++k) out.theta[k] = out.keep[k] != 0 ? z[k] : 0;
  }
  return out;
}

TEST(TwoOfFourDescent, IsTheAlgorithmInDoublePrecision) {
  constexpr int64_t K = 38, N = 33;  // a last group of two
  const std::vector<float> w = normal(N * K, 2), C = correlated(K, 200, 3);
  const Answer ours = descend(w, C);
  int64_t moved = 0;
  double ours_loss = 0, wanda_loss = 0;
  for (int64_t n = 0; n < N; ++n) {
    const auto row = std::span(w).subspan(size_t(n * K), size_t{K});
    const auto theta = std::span(ours.theta).subspan(size_t(n * K), size_t{K});
    const Reference truth = reference(row, C);
    const std::vector<uint8_t> keep(ours.keep.begin() + n * K, ours.keep.begin() + (n + 1) * K);
    EXPECT_EQ(keep, truth.keep) << n;
    EXPECT_EQ(layout::find_bad_group(keep), -1);
    // On one support a step does not move two answers apart (eta |C| <= 2), so that at worst the roundings of 200 steps
    // add up: K 2^-24 of eta |w - theta| |C| <= 2 |w|, and one of the sum.
    double w_size = 0;
    for (const float value : row) w_size += double(value) * double(value);
    const double bound = 200 * (2 * K + 1) * 0x1p-24 * std::sqrt(w_size);
    for (size_t k = 0; k < size_t{K}; ++k) EXPECT_NEAR(theta[k], truth.theta[k], bound) << n << ' ' << k;
    Row got(theta.begin(), theta.end());
    ours_loss += loss(row, got, C), wanda_loss += loss(row, truth.wanda, C);
    moved += truth.iterations > 0;
    for (size_t k = 0; k < size_t{K}; ++k) EXPECT_TRUE(keep[k] != 0 || (theta[k] == 0 && !std::signbit(theta[k])));
  }
  EXPECT_EQ(moved, N);
  EXPECT_LT(ours_loss, 0.8 * wanda_loss) << "inputs that share directions make up for each other";
}

TEST(TwoOfFourDescent, IndependentInputsKeepTheLargestWeights) {
  constexpr int64_t K = 16, N = 5;
  const std::vector<float> w = normal(N * K, 4);
  std::vector<float> identity(K * K, 0.0f);
  for (size_t k = 0; k < K; ++k) identity[k * K + k] = 1;
  const Answer ours = descend(w, identity);
  for (int64_t n = 0; n < N; ++n) {
    Row size;
    for (int64_t k = 0; k < K; ++k) size.push_back(std::abs(double(w[size_t(n * K + k)])));
    const std::vector<uint8_t> keep = two_largest(size);
    for (size_t k = 0; k < size_t{K}; ++k) {
      const size_t at = size_t(n * K) + k;
      EXPECT_EQ(ours.keep[at], keep[k]);
      EXPECT_EQ(ours.theta[at], keep[k] != 0 ? w[at] : 0.0f);
    }
  }
}

TEST(TwoOfFourDescent, ZerosOfBothKinds) {
  const std::vector<float> w = normal(8, 5);
  const Answer nothing = descend(w, std::vector<float>(64, 0.0f));
  EXPECT_EQ(nothing.keep, (std::vector<uint8_t>{1, 1, 0, 0, 1, 1, 0, 0}));
  EXPECT_EQ(nothing.theta, (std::vector<float>{w[0], w[1], 0, 0, w[4], w[5], 0, 0}));
  const Answer zero = descend(std::vector<float>(8, 0.0f), correlated(8, 20, 6));
  EXPECT_EQ(layout::find_bad_group(zero.keep), -1);
  EXPECT_EQ(zero.theta, std::vector<float>(8, 0.0f));
}

// Rows come in pieces of any size.
TEST(TwoOfFourDescent, ARowDoesNotDependOnTheOthers) {
  constexpr int64_t K = 24, N = 9;
  const std::vector<float> w = normal(N * K, 7), C = correlated(K, 100, 8);
  const Answer all = descend(w, C);
  for (int64_t n = 0; n < N; ++n) {
    const Answer one = descend({w.begin() + n * K, w.begin() + (n + 1) * K}, C);
    EXPECT_EQ(one.keep, std::vector<uint8_t>(all.keep.begin() + n * K, all.keep.begin() + (n + 1) * K)) << n;
  }
}

}  // namespace
}  // namespace lacuna::calibrate
