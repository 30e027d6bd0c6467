#include "solver/gptq.h"

#include "solver/factor.h"
#include "solver/obs_sweep.h"

namespace lacuna::solver {

Solution gptq(const Problem& problem) {
  const at::Tensor& W = problem.W;
  const Factor factor = inverse_factor(problem.stats.second_moment, problem.options.damping);
  SweepGrid grid(W.size(0), W.size(1), problem.grid, W);
  obs_sweep(W.t().clone(at::MemoryFormat::Contiguous), factor.U, problem.options.block, nullptr, &grid);
  return stored(grid.rounded(), problem.grid, {});
}

}  // namespace lacuna::solver
