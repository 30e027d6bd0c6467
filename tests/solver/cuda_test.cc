// Every method on a CUDA device: the same problem as on the CPU, an answer as good, the same answer again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "problems.h"
#include "solver/project.h"
#include "solver/solve.h"

namespace lacuna::solver {
namespace {

using test::lost;

struct Case {
  std::string name;
  Grid grid;
  Pattern pattern;
  std::vector<std::string> methods;
};

std::vector<Case> cases() {
  const std::vector<std::string> prune = {"magnitude", "wanda", "sparsegpt", "awp", "awp+"},
                                 quantize = {"rtn", "gptq", "awq", "awp", "awp+"},
                                 joint = {"awq+wanda", "wanda+awq", "sparsegpt", "awp", "awp+"};
  return {{"half of each row", {}, test::row_pattern(0.5), prune},
          {"70% of the matrix", {}, test::unstructured_pattern(0.7), prune},
          {"2:4", {}, test::n_m_pattern(2, 4), prune},
          {"groups of 16", {}, test::group_pattern(16, 0.5), prune},
          {"INT4", {4, 32}, {}, quantize},
          {"INT2 with a partial group", {2, 40}, {}, quantize},
          {"half of each row and INT4", {4, 32}, test::row_pattern(0.5), joint},
          {"2:4 and INT3", {3, 32}, test::n_m_pattern(2, 4), joint}};
}

Problem on_cuda(const Problem& problem) {
  Problem out = problem;
  out.W = problem.W.to(at::kCUDA);
  out.stats.second_moment = problem.stats.second_moment.to(at::kCUDA);
  out.stats.mean_abs = problem.stats.mean_abs.to(at::kCUDA);
  return out;
}

void expect_equal(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  if (a.defined()) {
    EXPECT_TRUE(a.equal(b));
  }
}

TEST(SolveOnCuda, AsGoodAsOnTheCpuAndRepeatable) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device, or a LibTorch without CUDA";
  for (const auto& [N, K] : {std::pair<int64_t, int64_t>{48, 96}, {5, 70}, {130, 520}}) {
    Problem problem = test::random_problem(N, K, 3);
    for (const Case& one : cases()) {
      problem.grid = one.grid;
      problem.pattern = one.pattern;
      const Problem there = on_cuda(problem);
      for (const std::string& method : one.methods) {
        SCOPED_TRACE(fmt::format("{} x {}, {}, {}", N, K, one.name, method));
        const Solution host = solve(method, problem), device = solve(method, there), again = solve(method, there);
        ASSERT_TRUE(device.weight.is_cuda());
        // Sums in another order flip ties and near ties: other codes and supports, about as good.
        EXPECT_LE(lost(there, device), 1.03 * lost(problem, host) + 1e-12);
        ASSERT_EQ(host.keep.defined(), device.keep.defined());
        if (host.keep.defined()) {
          EXPECT_EQ(host.keep.sum().item<int64_t>(), device.keep.sum().item<int64_t>());
          EXPECT_EQ(device.weight.masked_select(device.keep.logical_not()).count_nonzero().item<int64_t>(), 0);
        }
        if (device.code.defined()) {
          const Rounded rounded{device.code.to(at::kFloat), {device.scale, device.zero}};
          EXPECT_TRUE(masked(decode(rounded, problem.grid), device.keep).equal(device.weight));
        }
        expect_equal(device.weight, again.weight);
        expect_equal(device.keep, again.keep);
        expect_equal(device.code, again.code);
        expect_equal(device.input_scale, again.input_scale);
      }
    }
  }
}

}  // namespace
}  // namespace lacuna::solver
