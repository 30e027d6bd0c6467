#include "solver/gqsa.h"

#include <cmath>

#include "solver/factor.h"
#include "solver/project.h"

namespace lacuna::solver {

at::Tensor gqsa_score(const Problem& problem) {
  const at::Tensor& C = problem.stats.second_moment;
  const at::Tensor inverse = damped_inverse(C, problem.options.damping).diagonal();
  const at::Tensor importance = inverse.reciprocal().masked_fill(dead_inputs(C), 0);
  at::Tensor score = problem.W.abs() * importance;
  if (problem.pattern.kind != Pattern::Kind::groups) return score;
  const int64_t K = score.size(1), group = std::min(problem.pattern.group, K), rest = K % group;
  if (rest > 0) score.narrow(1, K - rest, rest).mul_(std::sqrt(double(group) / double(rest)));
  return score;
}

Solution gqsa(const Problem& problem) {
  const at::Tensor keep = keep_mask(gqsa_score(problem), problem.pattern);
  const at::Tensor kept = masked(problem.W, keep);
  if (problem.grid.bits == 0) return stored(kept, keep);
  const Affine affine = fit_grid(kept, problem.grid);
  return stored(round_to_grid(kept, problem.grid, affine), problem.grid, keep);
}

}  // namespace lacuna::solver
