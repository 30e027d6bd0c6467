#include "solver/gptq.h"

#include "solver/factor.h"
#include "solver/obs_sweep.h"

namespace lacuna::solver {
namespace {

struct Rounding {
  SweepGrid& grid;
  void begin(int64_t k, const at::Tensor& Wt) { grid.begin(k, Wt, {}); }
  void column(int64_t k, const at::Tensor& w, at::Tensor& q) { grid.column(k, w, q); }
};

}  // namespace

Solution gptq(const Problem& problem) {
  const at::Tensor& W = problem.W;
  const Factor factor = inverse_factor(problem.stats.second_moment, problem.options.damping);
  SweepGrid grid(W.size(0), W.size(1), problem.grid, W);
  const int64_t units[] = {grid.unit()};
  obs_sweep(W.t().clone(at::MemoryFormat::Contiguous), factor.U, problem.options.block, units, Rounding{grid});
  return stored(grid.rounded(), problem.grid, {});
}

}  // namespace lacuna::solver
