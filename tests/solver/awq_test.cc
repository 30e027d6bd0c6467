#include "solver/awq.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "problems.h"
#include "solver/project.h"

namespace lacuna::solver {
namespace {

using test::lost;

Problem problem_of(int64_t N, int64_t K, uint64_t seed) {
  Problem problem = test::random_problem(N, K, seed);
  problem.grid = {3, 32};
  return problem;
}

TEST(Awq, LosesLessThanRoundingWhereInputsHaveOutliers) {
  const Problem problem = problem_of(24, 96, 1);
  EXPECT_LT(lost(problem, solve("awq", problem)), 0.8 * lost(problem, solve("rtn", problem)));
}

TEST(Awq, ScaleSearchContainsNoScaling) {
  Problem problem = problem_of(24, 96, 2);
  problem.options.search_ranges = false;
  problem.stats.second_moment = at::eye(96, at::kFloat);
  const double rtn = lost(problem, solve("rtn", problem));
  EXPECT_LE(lost(problem, solve("awq", problem)), rtn * (1 + 1e-6));
}

TEST(Awq, EqualInputsAreNotScaled) {
  Problem problem = problem_of(8, 64, 3);
  problem.stats.mean_abs = at::full({64}, 0.37f, at::kFloat);
  problem.options.search_ranges = false;
  const Solution awq = solve("awq", problem);
  EXPECT_TRUE(awq.input_scale.equal(at::ones({64}, at::kFloat)));
  EXPECT_TRUE(awq.code.equal(solve("rtn", problem).code));
}

TEST(Awq, SpreadOfScalesIsCentredAndTheStoredWeightIsScaled) {
  const Problem problem = problem_of(16, 96, 4);
  const Solution awq = solve("awq", problem);
  EXPECT_NEAR((awq.input_scale.max() * awq.input_scale.min()).item<float>(), 1, 1e-4);
  const at::Tensor outlier = awq.input_scale[5], usual = awq.input_scale.median();
  EXPECT_GT(outlier.item<float>(), 1.5f * usual.item<float>());
  // Half a step of the scaled weights, in their own unit.
  const at::Tensor error = (awq.weight - problem.W * awq.input_scale).abs();
  EXPECT_LT(error.mean().item<float>(), awq.scale.max().item<float>());
}

TEST(Awq, ClippingLosesNoMoreWithinGroupsThanNotClipping) {
  Problem problem = problem_of(16, 96, 5);
  // Inputs of different groups do not correlate: the loss is the sum of the groups'.
  at::Tensor C = at::zeros({96, 96}, at::kFloat);
  for (int64_t first = 0; first < 96; first += 32) {
    C.narrow(0, first, 32)
        .narrow(1, first, 32)
        .copy_(problem.stats.second_moment.narrow(0, first, 32).narrow(1, first, 32));
  }
  problem.stats.second_moment = C;
  const double clipped = lost(problem, solve("awq", problem));
  problem.options.search_ranges = false;
  EXPECT_LT(clipped, lost(problem, solve("awq", problem)));
}

TEST(Awq, InputScaleAloneIsTheOneOfTheAnswer) {
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    if (method.input_scale == nullptr) continue;
    Problem problem = problem_of(24, 96, 7);
    if (method.does == Method::Does::both) problem.pattern = test::row_pattern(0.5);
    const at::Tensor scale = input_scale(method, problem);
    EXPECT_GT(scale.max().item<float>(), scale.min().item<float>());
    EXPECT_TRUE(scale.equal(solve(method.name, problem).input_scale));
    problem.stats.mean_abs = at::Tensor();
    EXPECT_THROW(input_scale(method, problem), Error);
  }
}

TEST(AwqWanda, MasksAreWandasOfTheRoundedAndOfTheOriginal) {
  Problem problem = problem_of(16, 96, 6);
  const Solution awq = solve("awq", problem);
  problem.pattern = test::row_pattern(0.5);
  const at::Tensor norms = problem.stats.second_moment.diagonal().sqrt();
  const Solution after = solve("awq+wanda", problem), before = solve("wanda+awq", problem);
  EXPECT_TRUE(after.keep.equal(keep_mask(effective(awq).abs() * norms, problem.pattern)));
  EXPECT_TRUE(after.weight.equal(masked(awq.weight, after.keep)));
  EXPECT_TRUE(before.keep.equal(keep_mask(problem.W.abs() * norms, problem.pattern)));
  EXPECT_LT(lost(problem, before), lost(problem, after));  // its grids know the mask
}

}  // namespace
}  // namespace lacuna::solver
