#include "solver/awp.h"

#include <algorithm>
#include <cmath>

#include "solver/project.h"
#include "solver/rtn.h"
#include "solver/wanda.h"

namespace lacuna::solver {
namespace {

/// Row sums in float, their sum in double.
double total(const at::Tensor& t) { return t.sum(1).sum(at::kDouble).item<double>(); }

double frobenius(const at::Tensor& t) { return std::sqrt(total(t.square())); }

/// 0 where C is 0: every Theta is as good as another then.
double over_norm(double factor, const at::Tensor& C) {
  const double size = frobenius(C);
  return size > 0 ? factor / size : 0;
}

Solution awp_prune(const Problem& problem) {
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const Descent descent{over_norm(2, C), 200, 1e-4};
  const Solution start = wanda(problem);
  at::Tensor keep = start.keep;
  Descended end = descend(W, C, start.weight, descent, [&](const at::Tensor& Z, int) {
    keep = keep_mask(Z.abs(), problem.pattern);
    return masked(Z, keep);
  });
  Solution solution = stored(end.theta, keep);
  solution.iterations = end.iterations;
  solution.curve = std::move(end.curve);
  return solution;
}

Solution awp_quantize(const Problem& problem) {
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const Grid& grid = problem.grid;
  Rounded last;
  Descended end = descend(W, C, rtn(problem).weight, {over_norm(1.5, C), 10}, [&](const at::Tensor& Z, int) {
    last = round_to_grid(Z, grid, fit_grid(Z, grid));
    return decode(last, grid);
  });
  Solution solution = stored(last, grid, {});
  solution.iterations = end.iterations;
  solution.curve = std::move(end.curve);
  return solution;
}

Solution awp_joint(const Problem& problem) {
  constexpr int kRamp = 25, kPruning = 50, kIterations = 100;
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const Grid& grid = problem.grid;
  Rounded last;
  at::Tensor keep;
  Descended end = descend(W, C, W, {over_norm(1.5, C), kIterations}, [&](const at::Tensor& Z, int t) {
    const Pattern pattern = ramped(problem.pattern, std::min(1.0, double(t) / kRamp));
    if (t <= kPruning) return masked(Z, keep_mask(Z.abs(), pattern));
    if (problem.options.order == Order::prune_first) {
      keep = keep_mask(Z.abs(), pattern);
      const at::Tensor pruned = masked(Z, keep);
      last = round_to_grid(pruned, grid, fit_grid(pruned, grid));
      return masked(decode(last, grid), keep);
    }
    last = round_to_grid(Z, grid, fit_grid(Z, grid));
    const at::Tensor rounded = decode(last, grid);
    keep = keep_mask(rounded.abs(), pattern);
    return masked(rounded, keep);
  });
  Solution solution = stored(last, grid, keep);
  solution.iterations = end.iterations;
  solution.curve = std::move(end.curve);
  return solution;
}

}  // namespace

Descended descend(const at::Tensor& W, const at::Tensor& C, at::Tensor theta, const Descent& descent,
                  const std::function<at::Tensor(const at::Tensor& Z, int t)>& project) {
  Descended result;
  const double size = frobenius(W);
  const auto relative = [&](double value) { return size > 0 ? value / size : 0; };
  for (int t = 1;; ++t) {
    const at::Tensor difference = W - theta, step = difference.matmul(C);
    const double squared = total(difference * step);
    result.curve.push_back(relative(std::sqrt(std::max(squared, 0.0))));
    if (t > descent.iterations || (descent.tolerance > 0 && relative(2 * frobenius(step)) < descent.tolerance)) break;
    theta = project(at::add(theta, step, descent.eta), t);
    result.iterations = t;
  }
  result.theta = theta;
  return result;
}

Solution awp(const Problem& problem) {
  if (problem.grid.bits == 0) return awp_prune(problem);
  return problem.pattern.kind == Pattern::Kind::none ? awp_quantize(problem) : awp_joint(problem);
}

}  // namespace lacuna::solver
