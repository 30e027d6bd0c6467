#include "solver/check.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"
#include "problems.h"

namespace lacuna::solver {
namespace {

std::string error_of(std::string_view name, const Problem& problem) {
  try {
    solve(name, problem);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(CheckBlas, AcceptsThisMachine) { EXPECT_NO_THROW(check_blas()); }

TEST(CheckBlas, RateIsPositive) {
  const double rate = product_gflops();
  EXPECT_GT(rate, 0.01);
  EXPECT_LT(rate, 1e6);
}

TEST(CheckBlas, SeesOneWrongElementAndSaysWhatToSet) {
  const auto wrong = [](const at::Tensor& a, const at::Tensor& b) {
    at::Tensor product = at::matmul(a, b);
    product[200][3] += 0.1;
    return product;
  };
  try {
    check_product(wrong);
    FAIL() << "a wrong product passed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("OPENBLAS_CORETYPE"), std::string::npos) << error.what();
  }
  EXPECT_THROW(check_product([](const at::Tensor& a, const at::Tensor&) {
                 return at::full_like(a, std::numeric_limits<float>::quiet_NaN());
               }),
               Error);
}

TEST(CheckProblem, NamesWhatIsNotFiniteAndWhere) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Problem problem = test::random_problem(4, 8, 1);
    problem.pattern = test::row_pattern(0.5);
    problem.W[2][5] = bad;
    EXPECT_NE(error_of("awp", problem).find("weight: 1 of 32 values are not finite, the first at [2, 5]"),
              std::string::npos)
        << error_of("awp", problem);
    problem = test::random_problem(4, 8, 1);
    problem.pattern = test::row_pattern(0.5);
    problem.stats.second_moment[3][4] = bad;
    EXPECT_NE(error_of("awp", problem).find("second moment: 1 of 64 values are not finite, the first at [3, 4]"),
              std::string::npos);
    problem = test::random_problem(4, 8, 1);
    problem.grid = {4, 8};
    problem.stats.mean_abs[6] = bad;
    EXPECT_NE(error_of("awq", problem).find("mean |x|: 1 of 8 values are not finite, the first at [6]"),
              std::string::npos);
  }
}

TEST(CheckProblem, RefusesWhatDoesNotFit) {
  const Problem good = [] {
    Problem problem = test::random_problem(4, 8, 1);
    problem.pattern = test::row_pattern(0.5);
    return problem;
  }();
  EXPECT_EQ(error_of("awp", good), "");
  const auto refuses = [&](const std::function<void(Problem&)>& change) {
    Problem problem = good;
    problem.stats.second_moment = problem.stats.second_moment.clone();
    change(problem);
    return !error_of("awp", problem).empty();
  };
  EXPECT_TRUE(refuses([](Problem& p) { p.W = at::Tensor(); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.W = at::empty({0, 8}, at::kFloat); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.W = p.W.to(at::kDouble); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.W = p.W.narrow(1, 0, 7); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.stats.second_moment = at::Tensor(); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.stats.second_moment = at::eye(9, at::kFloat); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.stats.second_moment[0][1] += 10; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.stats.second_moment[2][2] = -1; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.pattern.sparsity = 1; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.pattern.sparsity = -0.1; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.pattern.sparsity = std::numeric_limits<double>::quiet_NaN(); }));
  EXPECT_TRUE(refuses([](Problem& p) {
    p.pattern = test::n_m_pattern(5, 4);
    p.pattern.sparsity = 0;
  }));
  EXPECT_TRUE(refuses([](Problem& p) { p.pattern = test::group_pattern(0, 0.5); }));
  EXPECT_TRUE(refuses([](Problem& p) { p.grid.bits = 9; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.grid.bits = 4, p.grid.group_size = -1; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.options.damping = -1; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.options.block = 0; }));
  EXPECT_TRUE(refuses([](Problem& p) { p.pattern = {}; }));  // nothing to do
}

TEST(CheckProblem, RefusesMethodsAskedForWhatTheyDoNotDo) {
  Problem prune = test::random_problem(4, 8, 1), quantize = prune, both = prune;
  prune.pattern = both.pattern = test::row_pattern(0.5);
  quantize.grid = both.grid = {4, 8};
  for (const Method& method : methods()) {
    using Does = Method::Does;
    const Does does = method.does;
    EXPECT_EQ(error_of(method.name, prune).empty(),
              does == Does::prune || does == Does::prune_or_both || does == Does::either_or_both)
        << method.name;
    EXPECT_EQ(error_of(method.name, quantize).empty(), does == Does::quantize || does == Does::either_or_both)
        << method.name;
    EXPECT_EQ(error_of(method.name, both).empty(),
              does == Does::both || does == Does::prune_or_both || does == Does::either_or_both)
        << method.name;
  }
}

TEST(CheckProblem, UnknownNamesListTheKnown) {
  const std::string text = error_of("obs", test::random_problem(2, 2, 1));
  for (const Method& method : methods()) EXPECT_NE(text.find(method.name), std::string::npos) << text;
}

}  // namespace
}  // namespace lacuna::solver
