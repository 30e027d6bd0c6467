#include "solver/awp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "problems.h"
#include "solver/project.h"

namespace lacuna::solver {
namespace {

using test::lost;
using test::random_problem;
using test::values;

double frobenius(const at::Tensor& t) { return at::linalg_vector_norm(t, 2, {}, false, at::kDouble).item<double>(); }

TEST(Awp, LossNeverGrowsWithAStepOfAtMostOneOverTheLargestEigenvalue) {
  for (const Pattern& pattern : {test::row_pattern(0.5), test::row_pattern(0.9), test::unstructured_pattern(0.6),
                                 test::n_m_pattern(2, 4), test::group_pattern(8, 0.5)}) {
    const Problem problem = random_problem(12, 64, 3);
    const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
    const double largest = at::linalg_eigvalsh(C.to(at::kDouble)).max().item<double>();
    for (const double eta : {1 / largest, 0.3 / largest}) {
      const at::Tensor start = masked(W, keep_mask(W.abs(), pattern));
      const Descended end = descend(W, C, start, {eta, 60},
                                    [&](const at::Tensor& Z, int) { return masked(Z, keep_mask(Z.abs(), pattern)); });
      ASSERT_EQ(end.curve.size(), 61u);
      for (size_t t = 1; t < end.curve.size(); ++t) EXPECT_LE(end.curve[t], end.curve[t - 1] * (1 + 1e-6)) << t;
      EXPECT_LT(end.curve.back(), end.curve.front());
      EXPECT_NEAR(end.curve.back(), std::sqrt(loss(W, end.theta, C)) / frobenius(W), 1e-6 * end.curve.front());
    }
  }
}

/// beta of Blumensath & Davies (2009), equation 6, over all supports of s of K inputs: (1 - beta) |z|^2 <= |A z|^2 <=
/// |z|^2 after scaling; with A^T A = C within [1 - beta, 1].
double restricted_isometry(const at::Tensor& C) {
  const at::Tensor eigenvalues = at::linalg_eigvalsh(C);
  return 1 - eigenvalues.min().item<double>();
}

TEST(Awp, HoldsTheBoundsOfTheoremA2AndCorollaryA3) {
  constexpr int64_t N = 6, K = 10, kKept = 3;
  Problem problem = random_problem(N, K, 4);
  // C near the identity, its eigenvalues in [0.9, 1]: so is every principal submatrix, 3k of them included.
  at::Tensor C = at::matmul(test::random_weights(K, K, 9), test::random_weights(K, K, 9).t()).to(at::kDouble);
  C = at::eye(K, C.options()) - C * (0.1 / at::linalg_eigvalsh(C).max().item<double>());
  ASSERT_LT(restricted_isometry(C), 0.125);
  ASSERT_LE(at::linalg_eigvalsh(C).max().item<double>(), 1 + 1e-9);
  const at::Tensor W = problem.W, Cf = C.to(at::kFloat);
  const at::Tensor Wd = W.to(at::kDouble);

  // The best k-sparse row of every row, by enumeration.
  at::Tensor best = at::zeros({N, K}, at::kDouble);
  std::vector<double> least(N, std::numeric_limits<double>::infinity());
  for (int64_t set = 0; set < (1 << K); ++set) {
    if (__builtin_popcountll(uint64_t(set)) != kKept) continue;
    std::vector<int64_t> support;
    for (int64_t k = 0; k < K; ++k) {
      if (set >> k & 1) support.push_back(k);
    }
    const at::Tensor S = at::tensor(support);
    const at::Tensor rows = C.index_select(0, S);
    const at::Tensor theta = at::linalg_solve(rows.index_select(1, S), rows.matmul(Wd.t())).t();  // [N, k]
    const at::Tensor full = at::zeros({N, K}, at::kDouble).index_copy(1, S, theta);
    const at::Tensor difference = Wd - full;
    const at::Tensor lost_rows = (difference.matmul(C) * difference).sum(1);
    for (int64_t r = 0; r < N; ++r) {
      const double value = lost_rows[r].item<double>();
      if (value < least[size_t(r)]) {
        least[size_t(r)] = value;
        best[r].copy_(full[r]);
      }
    }
  }

  int iterations = 0;
  for (int64_t r = 0; r < N; ++r) {
    iterations = std::max(iterations, int(std::ceil(std::log2(frobenius(best[r]) / std::sqrt(least[size_t(r)])))));
  }
  const Pattern pattern = test::row_pattern(1 - double(kKept) / K);
  for (int t = 1; t <= iterations + 5; ++t) {
    const Descended end = descend(W, Cf, at::zeros_like(W), {1, t},
                                  [&](const at::Tensor& Z, int) { return masked(Z, keep_mask(Z.abs(), pattern)); });
    const at::Tensor distance = end.theta.to(at::kDouble) - best;
    for (int64_t r = 0; r < N; ++r) {
      const double e = std::sqrt(least[size_t(r)]);
      EXPECT_LE(frobenius(distance[r]), frobenius(best[r]) / std::exp2(t) + 4 * e) << "row " << r << ", t " << t;
    }
    if (t >= iterations) {
      double all = 0;
      for (const double value : least) all += value;
      EXPECT_LE(frobenius(distance), 5 * std::sqrt(all));
    }
  }
}

TEST(Awp, PrunesFromWandaAndStopsAsPublished) {
  Problem problem = random_problem(16, 64, 8);
  problem.pattern = test::row_pattern(0.5);
  const Solution wanda = solve("wanda", problem), awp = solve("awp", problem);
  EXPECT_EQ(awp.iterations, 200);  // ill-conditioned: the tolerance is not reached
  ASSERT_EQ(awp.curve.size(), 201u);
  const double size = frobenius(problem.W);
  EXPECT_NEAR(awp.curve.front(), std::sqrt(lost(problem, wanda)) / size, 1e-5 * awp.curve.front());
  EXPECT_NEAR(awp.curve.back(), std::sqrt(lost(problem, awp)) / size, 1e-4 * awp.curve.front());
  EXPECT_LT(lost(problem, awp), lost(problem, wanda));

  problem.stats.second_moment = at::eye(64, at::kFloat) * 1e-6;  // its gradient is below the tolerance at the start
  const Solution stopped = solve("awp", problem);
  EXPECT_EQ(stopped.iterations, 0);
  EXPECT_TRUE(stopped.weight.equal(solve("wanda", problem).weight));
}

TEST(Awp, OneIterationIsAlgorithmOneWithoutTheFactorTwo) {
  const Problem problem = random_problem(3, 16, 2);
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const at::Tensor start = W * 0.5;
  at::Tensor seen;
  descend(W, C, start, {0.01, 1}, [&](const at::Tensor& Z, int t) {
    EXPECT_EQ(t, 1);
    return seen = Z.clone();
  });
  const at::Tensor expected = start.to(at::kDouble) + 0.01 * (W - start).to(at::kDouble).matmul(C.to(at::kDouble));
  EXPECT_LT((seen.to(at::kDouble) - expected).abs().max().item<double>(), 1e-5 * expected.abs().max().item<double>());
}

TEST(Awp, QuantizesInTenIterations) {
  Problem problem = random_problem(8, 96, 5);
  problem.grid = {3, 32};
  const Solution awp = solve("awp", problem), rtn = solve("rtn", problem);
  EXPECT_EQ(awp.iterations, 10);
  EXPECT_NEAR(awp.curve.front(), std::sqrt(lost(problem, rtn)) / frobenius(problem.W), 1e-5 * awp.curve.front());
  EXPECT_TRUE(awp.weight.equal(decode({awp.code.to(at::kFloat), {awp.scale, awp.zero}}, problem.grid)));
}

TEST(Awp, JointRunsOneHundredIterationsInBothOrders) {
  Problem problem = random_problem(8, 96, 6);
  problem.grid = {4, 32};
  problem.pattern = test::row_pattern(0.5);
  std::vector<double> losses;
  for (const Order order : {Order::prune_first, Order::quantize_first}) {
    problem.options.order = order;
    const Solution awp = solve("awp", problem);
    EXPECT_EQ(awp.iterations, 100);
    EXPECT_EQ(awp.curve.size(), 101u);
    EXPECT_EQ(awp.curve.front(), 0);  // it starts from W
    EXPECT_TRUE((awp.keep.sum(1) == 48).all().item<bool>());
    losses.push_back(lost(problem, awp));
  }
  EXPECT_NE(losses[0], losses[1]);
}

}  // namespace
}  // namespace lacuna::solver
