#include "solver/sparsegpt.h"

#include "solver/factor.h"
#include "solver/obs_sweep.h"

namespace lacuna::solver {
namespace {

struct Masking {
  SweepMask& mask;
  void begin(int64_t k, const at::Tensor& Wt) { mask.begin(k, Wt); }
  void column(int64_t k, const at::Tensor& w, at::Tensor& q) { at::mul_out(q, w, mask.keep_t.select(0, k)); }
};

/// The grid is fitted to what the masks leave; where a group reaches past the masks chosen so far, to all of the rest.
struct MaskingAndRounding {
  SweepMask& mask;
  SweepGrid& grid;
  void begin(int64_t k, const at::Tensor& Wt) {
    mask.begin(k, Wt);
    grid.begin(k, Wt, mask.keep_t);
  }
  void column(int64_t k, const at::Tensor& w, at::Tensor& q) {
    grid.column(k, w, q);
    q.mul_(mask.keep_t.select(0, k));
  }
};

}  // namespace

Solution sparsegpt(const Problem& problem) {
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const int64_t N = W.size(0), K = W.size(1), block = problem.options.block;
  const Factor factor = inverse_factor(C, problem.options.damping);
  SweepMask mask(N, factor.U, dead_inputs(C), problem.pattern, block);
  const at::Tensor Wt = W.t().clone(at::MemoryFormat::Contiguous);
  if (problem.grid.bits == 0) {
    const int64_t units[] = {mask.unit()};
    const at::Tensor Q = obs_sweep(Wt, factor.U, block, units, Masking{mask});
    return stored(Q.t().contiguous(), mask.keep_t.t().contiguous());
  }
  SweepGrid grid(N, K, problem.grid, W);
  const int64_t units[] = {mask.unit(), grid.unit()};
  obs_sweep(Wt, factor.U, block, units, MaskingAndRounding{mask, grid});
  return stored(grid.rounded(), problem.grid, mask.keep_t.t().contiguous());
}

}  // namespace lacuna::solver
