#include "solver/awp_plus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "problems.h"
#include "solver/coordinate_descent.h"
#include "solver/least_squares.h"
#include "solver/project.h"

namespace lacuna::solver {
namespace {

using test::lost;
using test::values;

struct Best {
  double value = std::numeric_limits<double>::infinity();
  std::vector<double> theta;
};

/// In double: the k weights of one row that lose least, over all supports (or with W's own values), by elimination.
Best best_row(const std::vector<double>& w, const std::vector<double>& C, int64_t kept, bool refit) {
  const int64_t K = int64_t(w.size());
  Best best;
  for (uint64_t set = 0; set < (uint64_t{1} << K); ++set) {
    if (__builtin_popcountll(set) != kept) continue;
    std::vector<double> theta(w.size(), 0);
    std::vector<int64_t> S;
    for (int64_t k = 0; k < K; ++k) {
      if (set >> k & 1) S.push_back(k);
    }
    if (refit) {
      const size_t s = S.size();
      std::vector<double> A(s * (s + 1));
      for (size_t i = 0; i < s; ++i) {
        for (size_t j = 0; j < s; ++j) A[i * (s + 1) + j] = C[size_t(S[i] * K + S[j])];
        for (int64_t k = 0; k < K; ++k) A[i * (s + 1) + s] += C[size_t(S[i] * K + k)] * w[size_t(k)];
      }
      for (size_t c = 0; c < s; ++c) {
        for (size_t r = 0; r < s; ++r) {
          if (r == c) continue;
          const double factor = A[r * (s + 1) + c] / A[c * (s + 1) + c];
          for (size_t j = c; j <= s; ++j) A[r * (s + 1) + j] -= factor * A[c * (s + 1) + j];
        }
      }
      for (size_t i = 0; i < s; ++i) theta[size_t(S[i])] = A[i * (s + 1) + s] / A[i * (s + 1) + i];
    } else {
      for (const int64_t k : S) theta[size_t(k)] = w[size_t(k)];
    }
    double value = 0;
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < K; ++j) {
        value += (w[size_t(i)] - theta[size_t(i)]) * C[size_t(i * K + j)] * (w[size_t(j)] - theta[size_t(j)]);
      }
    }
    if (value < best.value) best = {value, theta};
  }
  return best;
}

double best_matrix(const Problem& problem, int64_t kept, bool refit) {
  const int64_t N = problem.W.size(0), K = problem.W.size(1);
  const std::vector<double> w = values(problem.W), C = values(problem.stats.second_moment);
  double sum = 0;
  for (int64_t n = 0; n < N; ++n) sum += best_row({w.begin() + n * K, w.begin() + (n + 1) * K}, C, kept, refit).value;
  return sum;
}

TEST(AwpPlus, IsNearTheBestOfAllSupports) {
  double worst = 0, mean = 0, awp_mean = 0, sparsegpt_mean = 0;
  int count = 0;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    for (const double sparsity : {0.3, 0.5, 0.7}) {
      Problem problem = test::random_problem(16, 10, seed);
      problem.pattern = test::row_pattern(sparsity);
      const double least = best_matrix(problem, 10 - floor_share(sparsity, 10), true);
      const auto ratio = [&](const char* name) { return lost(problem, solve(name, problem)) / least; };
      const double plus = ratio("awp+");
      EXPECT_GE(plus, 1 - 1e-5);
      worst = std::max(worst, plus), mean += plus, awp_mean += ratio("awp"), sparsegpt_mean += ratio("sparsegpt");
      ++count;
    }
  }
  RecordProperty("awp_plus_mean", std::to_string(mean / count));
  RecordProperty("awp_plus_worst", std::to_string(worst));
  RecordProperty("awp_mean", std::to_string(awp_mean / count));
  RecordProperty("sparsegpt_mean", std::to_string(sparsegpt_mean / count));
  EXPECT_LT(mean / count, 1.2);
  EXPECT_LT(worst, 1.5);
}

TEST(Magnitude, IsTheBestOfAllSupportsWhereInputsAreWhite) {
  Problem problem = test::random_problem(5, 9, 3);
  problem.stats.second_moment = at::eye(9, at::kFloat) * 3;
  problem.pattern = test::row_pattern(0.5);
  EXPECT_NEAR(lost(problem, solve("magnitude", problem)), best_matrix(problem, 5, false), 1e-6);
}

TEST(Wanda, IsTheBestOfAllSupportsWhereInputsDoNotCorrelate) {
  Problem problem = test::random_problem(5, 9, 3);
  problem.stats.second_moment = at::diag(problem.stats.second_moment.diagonal()).contiguous();
  problem.pattern = test::row_pattern(0.5);
  const double least = best_matrix(problem, 5, false);
  for (const char* name : {"wanda", "sparsegpt", "awp+"}) {
    // SparseGPT's mask of one block is exact here too; damping moves its scores by at most the damping's share.
    EXPECT_NEAR(lost(problem, solve(name, problem)), least, (name[0] == 's' ? 0.05 : 1e-5) * least) << name;
  }
}

TEST(DescendCodes, IsNearTheBestOfAllCodesOfItsGrid) {
  constexpr int64_t N = 12, K = 6;
  const Grid grid{2, 0};
  double start_sum = 0, end_sum = 0, least_sum = 0;
  for (const uint64_t seed : {1, 2, 3}) {
    const Problem problem = test::random_problem(N, K, seed);
    const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
    const Rounded start = round_to_grid(W, grid, fit_grid(W, grid));
    const Rounded end = descend_codes(W, C, grid, start, {}, 1);  // one pass: its scales are the start's
    EXPECT_TRUE(end.affine.scale.equal(start.affine.scale));
    const std::vector<double> w = values(W), c = values(C), s = values(end.affine.scale), z = values(end.affine.zero);
    for (int64_t n = 0; n < N; ++n) {
      const auto value = [&](const auto& code) {
        double d[K], sum = 0;
        for (int64_t k = 0; k < K; ++k) d[k] = w[size_t(n * K + k)] - s[size_t(n)] * (code(k) - z[size_t(n)]);
        for (int64_t i = 0; i < K; ++i) {
          for (int64_t j = 0; j < K; ++j) sum += d[i] * c[size_t(i * K + j)] * d[j];
        }
        return sum;
      };
      double least = std::numeric_limits<double>::infinity();
      for (int64_t all = 0; all < (1 << (2 * K)); ++all) {
        least = std::min(least, value([&](int64_t k) { return double(all >> (2 * k) & 3); }));
      }
      const std::vector<double> from = values(start.code), to = values(end.code);
      const double before = value([&](int64_t k) { return from[size_t(n * K + k)]; });
      const double after = value([&](int64_t k) { return to[size_t(n * K + k)]; });
      EXPECT_LE(after, before * (1 + 1e-6));
      EXPECT_GE(after, least * (1 - 1e-6));
      start_sum += before, end_sum += after, least_sum += least;
    }
  }
  EXPECT_LT(end_sum - least_sum, 0.5 * (start_sum - least_sum));
}

TEST(DescendCodes, NeverLosesMoreWithEveryPass) {
  Problem problem = test::random_problem(20, 150, 5);
  for (const int bits : {2, 4}) {
    for (const bool prune : {false, true}) {
      const Grid grid{bits, 48};
      const at::Tensor keep = prune ? keep_mask(problem.W.abs(), test::row_pattern(0.5)) : at::Tensor();
      const Rounded start = round_to_grid(problem.W, grid, fit_grid(problem.W, grid));
      double last = loss(problem.W, masked(decode(start, grid), keep), problem.stats.second_moment);
      for (const int passes : {1, 2, 3, 6, 10}) {
        const Rounded end = descend_codes(problem.W, problem.stats.second_moment, grid, start, keep, passes);
        const double now = loss(problem.W, masked(decode(end, grid), keep), problem.stats.second_moment);
        EXPECT_LE(now, last * (1 + 1e-5)) << bits << " bits, " << passes << " passes";
        last = now;
      }
    }
  }
}

TEST(DescendCodes, KeepsScalesThatAreFixed) {
  const Problem problem = test::random_problem(24, 96, 5);
  const Grid grid{3, 32};
  const Rounded start = round_to_grid(problem.W, grid, fit_grid(problem.W, grid));
  const at::Tensor& C = problem.stats.second_moment;
  const Rounded fixed = descend_codes(problem.W, C, grid, start, {}, 10, Scales::fixed);
  EXPECT_TRUE(fixed.affine.scale.equal(start.affine.scale));
  EXPECT_LT(loss(problem.W, decode(fixed, grid), C), loss(problem.W, decode(start, grid), C));
  EXPECT_FALSE(descend_codes(problem.W, C, grid, start, {}, 10).affine.scale.equal(start.affine.scale));
}

TEST(AwpPlus, WholeRangesCoverAWeightWhoseInputCountsForLittle) {
  Problem problem = test::random_problem(16, 64, 6);
  problem.grid = {3, 32};
  problem.W.select(1, 7).fill_(12 * problem.W.abs().mean().item<float>());
  at::Tensor& C = problem.stats.second_moment;
  C.select(0, 7).mul_(1e-3);
  C.select(1, 7).mul_(1e-3);
  // The first group's grid is fitted before the sweep has moved a weight of it.
  const at::Tensor first = problem.W.narrow(1, 0, 32);
  const at::Tensor range = std::get<0>(first.max(1)).clamp_min(0) - std::get<0>(first.min(1)).clamp_max(0);
  const auto covered = [&] { return (solve("awp+", problem).scale.select(1, 0) * 7 / range).mean().item<float>(); };
  EXPECT_LT(covered(), 0.8f);
  problem.options.search_ranges = false;
  EXPECT_NEAR(covered(), 1, 1e-3);
}

TEST(LeastSquares, LeavesNoGradientOnTheSupport) {
  for (const double sparsity : {0.2, 0.5, 0.8}) {
    const Problem problem = test::random_problem(16, 64, 6);
    const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
    const at::Tensor keep = keep_mask(W.abs(), test::unstructured_pattern(sparsity));
    const at::Tensor theta = least_squares(W, C, keep);
    EXPECT_TRUE(masked(theta, keep).equal(theta));
    const at::Tensor norms = C.diagonal().sqrt();
    const auto gradient = [&](const at::Tensor& t) {
      return masked((W - t).to(at::kDouble).matmul(C.to(at::kDouble)) / norms, keep).norm().item<double>();
    };
    EXPECT_LT(gradient(theta), 0.01 * gradient(masked(W, keep))) << sparsity;
    EXPECT_LT(loss(W, theta, C), loss(W, masked(W, keep), C));
  }
}

TEST(LeastSquares, EqualsEliminationInDouble) {
  const Problem problem = test::random_problem(6, 12, 7);
  const at::Tensor keep = keep_mask(problem.W.abs(), test::row_pattern(0.5));
  const at::Tensor theta = least_squares(problem.W, problem.stats.second_moment, keep);
  const std::vector<double> w = values(problem.W), C = values(problem.stats.second_moment),
                            m = values(keep.to(at::kFloat));
  at::Tensor expected = at::zeros({6, 12}, at::kDouble);
  const at::Tensor Cd = problem.stats.second_moment.to(at::kDouble), Wd = problem.W.to(at::kDouble);
  for (int64_t n = 0; n < 6; ++n) {
    const at::Tensor S = keep[n].nonzero().flatten(), rows = Cd.index_select(0, S);
    expected[n].index_copy_(0, S, at::linalg_solve(rows.index_select(1, S), rows.matmul(Wd[n])));
  }
  EXPECT_NEAR(loss(problem.W, theta, problem.stats.second_moment),
              loss(problem.W, expected.to(at::kFloat), problem.stats.second_moment),
              1e-3 * loss(problem.W, expected.to(at::kFloat), problem.stats.second_moment));
}

}  // namespace
}  // namespace lacuna::solver
