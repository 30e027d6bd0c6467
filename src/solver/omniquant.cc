#include "solver/omniquant.h"

#include <cmath>

namespace lacuna::solver {

Range range_of(const at::Tensor& W, const Grid& grid) {
  const at::Tensor groups = grouped(W, grid.group(W.size(1)));
  return {groups.amin({2}, true).clamp_max(0), groups.amax({2}, true).clamp_min(0)};
}

Solution round_on_range(const at::Tensor& W, const Range& range, const Grid& grid) {
  const Affine affine = fit_range(range.low.squeeze(2), range.high.squeeze(2), grid);
  Solution solution = stored(round_to_grid(W, grid, affine), grid, {});
  const at::Tensor groups = grouped(W, grid.group(W.size(1)));
  solution.unrounded = ungrouped(at::maximum(at::minimum(groups, range.high), range.low), W.size(1));
  return solution;
}

Solution omniquant(const Problem& problem) {
  const double share = 1 / (1 + std::exp(-kFirstStrength));
  const Range whole = range_of(problem.W, problem.grid);
  return round_on_range(problem.W, {whole.low * share, whole.high * share}, problem.grid);
}

}  // namespace lacuna::solver
