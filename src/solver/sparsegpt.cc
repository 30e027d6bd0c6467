#include "solver/sparsegpt.h"

#include "solver/factor.h"
#include "solver/obs_sweep.h"

namespace lacuna::solver {

Solution sparsegpt(const Problem& problem) {
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const int64_t N = W.size(0), K = W.size(1), block = problem.options.block;
  const Factor factor = inverse_factor(C, problem.options.damping);
  SweepMask mask(N, factor.U, dead_inputs(C), problem.pattern, block);
  const at::Tensor Wt = W.t().clone(at::MemoryFormat::Contiguous);
  if (problem.grid.bits == 0) {
    const at::Tensor Q = obs_sweep(Wt, factor.U, block, &mask, nullptr);
    return stored(Q.t().contiguous(), mask.keep_t.t().contiguous());
  }
  // The grid is fitted to what the masks leave; where a group reaches past the masks chosen so far, to all of the rest.
  SweepGrid grid(N, K, problem.grid, W);
  obs_sweep(Wt, factor.U, block, &mask, &grid);
  return stored(grid.rounded(), problem.grid, mask.keep_t.t().contiguous());
}

}  // namespace lacuna::solver
