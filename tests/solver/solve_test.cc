// What holds for every method: the contract of a Solution, inputs that broke other projects, repeatability, and that
// awp+ is the best of every row.
#include "solver/solve.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/error.h"
#include "problems.h"
#include "solver/project.h"

namespace lacuna::solver {
namespace {

using test::lost;
using test::random_problem;

struct Row {
  std::string name;
  Grid grid;
  Pattern pattern;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  const std::vector<Row> grids = {{"dense", {}, {}},
                                  {"int4", {4, 32}, {}},
                                  {"int3 of whole rows", {3, 0}, {}},
                                  {"int2, group past K", {2, 4096}, {}},
                                  {"int8, partial last group", {8, 20}, {}}};
  const std::vector<Row> patterns = {{"all", {}, {}},
                                     {"row 0", {}, test::row_pattern(0)},
                                     {"row 50", {}, test::row_pattern(0.5)},
                                     {"row 99", {}, test::row_pattern(0.99)},
                                     {"unstructured 60", {}, test::unstructured_pattern(0.6)},
                                     {"2:4", {}, test::n_m_pattern(2, 4)},
                                     {"group16", {}, test::group_pattern(16, 0.5)}};
  for (const Row& grid : grids) {
    for (const Row& pattern : patterns) {
      if (grid.grid.bits == 0 && pattern.pattern.kind == Pattern::Kind::none) continue;
      all.push_back({grid.name + ", " + pattern.name, grid.grid, pattern.pattern});
    }
  }
  return all;
}

bool does(const Method& method, const Row& row) {
  const bool prune = row.pattern.kind != Pattern::Kind::none, quantize = row.grid.bits != 0;
  switch (method.does) {
    case Method::Does::prune:
      return prune && !quantize;
    case Method::Does::quantize:
      return quantize && !prune;
    case Method::Does::both:
      return prune && quantize;
    case Method::Does::prune_or_both:
      return prune;
    case Method::Does::either_or_both:
      return prune || quantize;
  }
  return false;
}

void expect_allowed(const at::Tensor& keep, const Pattern& pattern) {
  const int64_t N = keep.size(0), K = keep.size(1);
  switch (pattern.kind) {
    case Pattern::Kind::none:
      break;
    case Pattern::Kind::row:
      EXPECT_TRUE((keep.sum(1) == K - floor_share(pattern.sparsity, K)).all().item<bool>());
      break;
    case Pattern::Kind::unstructured:
      EXPECT_EQ(keep.sum().item<int64_t>(), N * K - floor_share(pattern.sparsity, N * K));
      break;
    case Pattern::Kind::n_m:
      EXPECT_LE(grouped(keep.to(at::kFloat), pattern.m).sum(2).max().item<float>(), float(pattern.n));
      break;
    case Pattern::Kind::groups: {
      const at::Tensor groups = grouped(keep.to(at::kFloat), pattern.group).amax({2});
      EXPECT_EQ(groups.sum().item<int64_t>(), groups.numel() - floor_share(pattern.sparsity, groups.numel()));
      const at::Tensor whole = groups.unsqueeze(2).expand({N, groups.size(1), std::min(pattern.group, K)});
      EXPECT_TRUE(ungrouped(whole, K).equal(keep.to(at::kFloat)));
      break;
    }
  }
}

void expect_contract(const Problem& problem, const Solution& solution) {
  const int64_t N = problem.W.size(0), K = problem.W.size(1);
  ASSERT_EQ(solution.weight.sizes(), problem.W.sizes());
  EXPECT_EQ(solution.weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(solution.weight.is_contiguous());
  EXPECT_TRUE(solution.weight.isfinite().all().item<bool>());
  ASSERT_EQ(solution.keep.defined(), problem.pattern.kind != Pattern::Kind::none);
  if (solution.keep.defined()) {
    ASSERT_EQ(solution.keep.scalar_type(), at::kBool);
    expect_allowed(solution.keep, problem.pattern);
    const at::Tensor dropped = solution.weight.masked_select(solution.keep.logical_not());
    EXPECT_TRUE((dropped == 0).all().item<bool>());
    EXPECT_FALSE(dropped.signbit().any().item<bool>());
  }
  ASSERT_EQ(solution.code.defined(), problem.grid.bits != 0);
  if (solution.code.defined()) {
    const std::vector<int64_t> groups = {N, problem.grid.groups(K)};
    ASSERT_EQ(solution.code.scalar_type(), at::kByte);
    ASSERT_EQ(solution.scale.sizes(), groups);
    ASSERT_EQ(solution.zero.sizes(), groups);
    EXPECT_LT(solution.code.max().item<int>(), 1 << problem.grid.bits);
    for (const at::Tensor& stored : {solution.scale, solution.zero}) {
      EXPECT_TRUE(stored.is_contiguous());
      EXPECT_TRUE(stored.isfinite().all().item<bool>());
      EXPECT_TRUE(stored.to(at::kHalf).to(at::kFloat).equal(stored));
      EXPECT_GE(stored.min().item<float>(), 0);
    }
    EXPECT_TRUE(solution.zero.round().equal(solution.zero));
    const Rounded rounded{solution.code.to(at::kFloat), {solution.scale, solution.zero}};
    EXPECT_TRUE(masked(decode(rounded, problem.grid), solution.keep).equal(solution.weight));
    if (solution.keep.defined()) {
      EXPECT_EQ(solution.code.masked_fill(solution.keep, 0).max().item<int>(), 0);
    }
  }
  if (solution.input_scale.defined()) {
    EXPECT_EQ(solution.input_scale.sizes(), std::vector<int64_t>{K});
    EXPECT_GT(solution.input_scale.min().item<float>(), 0);
  }
}

void expect_all_solved(const Problem& base, const std::string& what) {
  for (const Row& row : rows()) {
    for (const Method& method : methods()) {
      if (!does(method, row)) continue;
      SCOPED_TRACE(what + ": " + std::string(method.name) + ", " + row.name);
      Problem problem = base;
      problem.grid = row.grid;
      problem.pattern = row.pattern;
      Solution solution;
      ASSERT_NO_THROW(solution = solve(method.name, problem));
      expect_contract(problem, solution);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Solve, EveryMethodKeepsTheContract) { expect_all_solved(random_problem(7, 50, 1), "7 x 50"); }

TEST(Solve, AnyShape) {
  for (const auto& [N, K] : {std::pair<int64_t, int64_t>{1, 1}, {1, 33}, {9, 1}, {3, 2}, {2, 130}}) {
    expect_all_solved(random_problem(N, K, 2), fmt::format("{} x {}", N, K));
  }
}

TEST(Solve, InputsThatBrokeOtherProjects) {
  const Problem base = random_problem(6, 48, 3);
  Problem problem = base;
  at::Tensor C = base.stats.second_moment.clone();
  C.select(0, 7).zero_(), C.select(1, 7).zero_();
  problem.stats.second_moment = C;
  problem.stats.mean_abs = base.stats.mean_abs.clone();
  problem.stats.mean_abs[7] = 0;
  expect_all_solved(problem, "a dead input");

  problem.stats.second_moment = at::zeros({48, 48}, at::kFloat);
  problem.stats.mean_abs = at::zeros({48}, at::kFloat);
  expect_all_solved(problem, "no input ever used");

  problem = base;
  problem.stats = test::correlated_inputs(48, 8, 5);
  expect_all_solved(problem, "8 tokens");
  problem.stats = test::correlated_inputs(48, 1, 5);
  expect_all_solved(problem, "1 token");

  problem = base;
  for (const double factor : {1e-38, 1e-30, 1e30}) {
    problem.stats.second_moment = base.stats.second_moment * factor / 100;
    problem.stats.mean_abs = base.stats.mean_abs * std::sqrt(factor / 100);
    expect_all_solved(problem, fmt::format("second moments times {}", factor));
  }

  problem = base;
  problem.W = base.W.clone();
  problem.W.narrow(1, 0, 32).select(0, 2).zero_();
  problem.W.select(0, 4).zero_();
  expect_all_solved(problem, "a zero group and a zero row");
  problem.W = at::zeros({6, 48}, at::kFloat);
  expect_all_solved(problem, "all weights zero");
  problem.W = at::full({6, 48}, 1e-40f, at::kFloat);
  expect_all_solved(problem, "denormal weights");
  problem.W = at::ones({6, 48}, at::kFloat);
  expect_all_solved(problem, "equal weights");
}

TEST(Solve, DampingIsRaisedUntilItFactorizesThenAnErrorSaysSo) {
  Problem problem = random_problem(4, 8, 1);
  problem.grid = {4, 8};
  at::Tensor C = at::eye(8, at::kFloat);
  C[0][1] = C[1][0] = 1.05f;  // an eigenvalue of -0.05: 0.01 is not enough, 0.1 is
  problem.stats.second_moment = C;
  EXPECT_NO_THROW(solve("gptq", problem));
  C[0][1] = C[1][0] = 50;
  try {
    solve("gptq", problem);
    FAIL() << "an indefinite second moment passed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("not positive semidefinite"), std::string::npos) << error.what();
  }
}

TEST(Solve, SameArgumentsSameBits) {
  for (const Row& row : rows()) {
    for (const Method& method : methods()) {
      if (!does(method, row)) continue;
      Problem problem = random_problem(16, 64, 9);
      problem.grid = row.grid;
      problem.pattern = row.pattern;
      const at::Tensor W = problem.W.clone(), C = problem.stats.second_moment.clone();
      const Solution first = solve(method.name, problem), second = solve(method.name, problem);
      EXPECT_TRUE(first.weight.equal(second.weight)) << method.name << ", " << row.name;
      EXPECT_TRUE(problem.W.equal(W) && problem.stats.second_moment.equal(C))
          << method.name << " changes its arguments";
    }
  }
}

TEST(Solve, AnswersDoNotDependOnTheUnitOfTheInputs) {
  for (const Method& method : methods()) {
    Problem problem = random_problem(8, 48, 12);
    if (method.does != Method::Does::quantize) problem.pattern = test::row_pattern(0.5);
    if (method.does == Method::Does::quantize || method.does == Method::Does::both) problem.grid = {4, 16};
    const Solution here = solve(method.name, problem);
    problem.stats.second_moment = problem.stats.second_moment * 0x1p-100;
    const Solution there = solve(method.name, problem);
    EXPECT_TRUE(here.keep.defined() ? here.keep.equal(there.keep) : here.code.equal(there.code)) << method.name;
  }
}

TEST(Solve, AwpPlusIsTheBestOfEveryRow) {
  for (const uint64_t seed : {1, 2, 3}) {
    for (const Row& row : rows()) {
      if (row.pattern.kind != Pattern::Kind::none && row.pattern.sparsity == 0 && row.grid.bits == 0)
        continue;  // all lose 0
      Problem problem = random_problem(48, 136, seed);
      problem.grid = row.grid;
      problem.pattern = row.pattern;
      const double best = lost(problem, solve("awp+", problem));
      for (const Method& method : methods()) {
        if (!does(method, row) || method.name == "awp+") continue;
        EXPECT_LE(best, lost(problem, solve(method.name, problem)))
            << method.name << ", " << row.name << ", seed " << seed;
      }
    }
  }
}

TEST(Loss, IsTheTraceInDouble) {
  const Problem problem = random_problem(5, 12, 4);
  const at::Tensor theta = problem.W * 0.7;
  const std::vector<double> w = test::values(problem.W), q = test::values(theta),
                            c = test::values(problem.stats.second_moment);
  double expected = 0;
  for (size_t n = 0; n < 5; ++n) {
    for (size_t i = 0; i < 12; ++i) {
      for (size_t j = 0; j < 12; ++j) {
        expected += (w[n * 12 + i] - q[n * 12 + i]) * c[i * 12 + j] * (w[n * 12 + j] - q[n * 12 + j]);
      }
    }
  }
  EXPECT_NEAR(loss(problem.W, theta, problem.stats.second_moment), expected, 1e-5 * expected);
}

}  // namespace
}  // namespace lacuna::solver
