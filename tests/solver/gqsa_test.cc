#include "solver/gqsa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "problems.h"
#include "solver/project.h"

namespace lacuna::solver {
namespace {

using test::values;

/// Inverse of a small positive definite matrix, in double, by elimination.
std::vector<double> inverse_of(std::vector<double> A, size_t n) {
  std::vector<double> inverse(n * n, 0);
  for (size_t i = 0; i < n; ++i) inverse[i * n + i] = 1;
  for (size_t c = 0; c < n; ++c) {
    const double pivot = A[c * n + c];
    for (size_t j = 0; j < n; ++j) A[c * n + j] /= pivot, inverse[c * n + j] /= pivot;
    for (size_t r = 0; r < n; ++r) {
      if (r == c) continue;
      const double factor = A[r * n + c];
      for (size_t j = 0; j < n; ++j) {
        A[r * n + j] -= factor * A[c * n + j];
        inverse[r * n + j] -= factor * inverse[c * n + j];
      }
    }
  }
  return inverse;
}

/// Equation 4, averaged over groups, as the paper writes it.
std::vector<double> mean_saliency(const Problem& problem, size_t group) {
  const auto N = size_t(problem.W.size(0)), K = size_t(problem.W.size(1));
  std::vector<double> H = values(problem.stats.second_moment);
  double mean = 0;
  for (size_t i = 0; i < K; ++i) mean += H[i * K + i] / double(K);
  for (size_t i = 0; i < K; ++i) H[i * K + i] += problem.options.damping * mean;
  const std::vector<double> inverse = inverse_of(H, K), w = values(problem.W);
  std::vector<double> out;
  for (size_t n = 0; n < N; ++n)
    for (size_t first = 0; first < K; first += group) {
      const size_t end = std::min(first + group, K);
      double sum = 0;
      for (size_t k = first; k < end; ++k) sum += std::pow(w[n * K + k] / inverse[k * K + k], 2);
      out.push_back(sum / double(end - first));
    }
  return out;
}

TEST(Gqsa, DropsTheGroupsOfLeastMeanSaliencyOfTheWholeMatrix) {
  for (const int64_t K : {64, 72, 8}) {  // whole groups, a shorter last one, one shorter than a group
    Problem problem = test::random_problem(12, K, 7);
    constexpr int64_t kGroup = 16;
    problem.pattern = test::group_pattern(kGroup, 0.5);
    const at::Tensor keep = solve("gqsa", problem).keep;
    const std::vector<double> saliency = mean_saliency(problem, size_t(kGroup));
    const auto groups = int64_t(saliency.size()) / 12;
    std::vector<size_t> order(saliency.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return saliency[a] < saliency[b]; });
    std::vector<bool> kept(saliency.size(), true);
    for (size_t i = 0; i < saliency.size() / 2; ++i) kept[order[i]] = false;
    for (int64_t n = 0; n < 12; ++n)
      for (int64_t k = 0; k < K; ++k)
        EXPECT_EQ(keep[n][k].item<bool>(), kept[size_t(n * groups + k / kGroup)]) << n << ' ' << k << " of " << K;
  }
}

TEST(Gqsa, RowsKeepDifferentNumbersOfGroupsDownToNone) {
  Problem problem = test::random_problem(8, 64, 8);
  problem.W[3].mul_(1e-4);
  problem.W[5].mul_(100);
  problem.pattern = test::group_pattern(16, 0.5);
  problem.grid = {4, 16};
  const Solution solution = solve("gqsa", problem);
  const at::Tensor kept = solution.keep.sum(1);
  EXPECT_EQ(kept[3].item<int64_t>(), 0);
  EXPECT_EQ(kept[5].item<int64_t>(), 64);
  EXPECT_EQ(kept.sum().item<int64_t>(), 8 * 64 / 2);
  EXPECT_TRUE(solution.weight[3].equal(at::zeros({64}, at::kFloat)));
}

TEST(Gqsa, RoundsWhatItKeepsToNearest) {
  Problem problem = test::random_problem(8, 64, 9);
  problem.pattern = test::group_pattern(16, 0.25);
  problem.grid = {4, 16};
  const Solution solution = solve("gqsa", problem);
  const at::Tensor step = grouped(at::ones_like(problem.W), 16) * solution.scale.unsqueeze(2);
  const at::Tensor error = (grouped(masked(problem.W, solution.keep) - solution.weight, 16)).abs();
  // Half a step, and what rounding the scale to f16 moves the ends of the range by.
  EXPECT_TRUE((error <= step * (0.5 + 15 * 0x1p-11) + 1e-9).all().item<bool>());
}

TEST(Gqsa, SurvivesZeroGroupsZeroRowsAndZeroMatrices) {
  for (const int kind : {0, 1, 2}) {
    Problem problem = test::random_problem(6, 48, 10);
    if (kind == 0) problem.W.narrow(1, 16, 16).zero_();
    if (kind == 1) problem.W[2].zero_();
    if (kind == 2) problem.W.zero_();
    problem.pattern = test::group_pattern(16, 0.3);
    problem.grid = {4, 16};
    EXPECT_TRUE(solve("gqsa", problem).weight.isfinite().all().item<bool>()) << kind;
  }
}

TEST(Gqsa, RanksSingleWeightsUnderOtherPatterns) {
  Problem problem = test::random_problem(6, 48, 11);
  problem.pattern = test::row_pattern(0.5);
  const std::vector<double> saliency = mean_saliency(problem, 1);
  const at::Tensor keep = solve("gqsa", problem).keep;
  for (int64_t n = 0; n < 6; ++n) {
    double least_kept = 1e300, most_dropped = 0;
    for (int64_t k = 0; k < 48; ++k) {
      const double s = saliency[size_t(n * 48 + k)];
      keep[n][k].item<bool>() ? least_kept = std::min(least_kept, s) : most_dropped = std::max(most_dropped, s);
    }
    EXPECT_GE(least_kept, most_dropped);
  }
}

}  // namespace
}  // namespace lacuna::solver
