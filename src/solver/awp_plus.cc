#include "solver/awp_plus.h"

#include "solver/coordinate_descent.h"
#include "solver/factor.h"
#include "solver/least_squares.h"
#include "solver/obs_sweep.h"
#include "solver/project.h"
#include "solver/support.h"

namespace lacuna::solver {
namespace {

struct RoundingOnSupport {
  SweepGrid& grid;
  at::Tensor keep_t;  // [K, N] or undefined
  void begin(int64_t k, const at::Tensor& Wt) { grid.begin(k, Wt, keep_t); }
  void column(int64_t k, const at::Tensor& w, at::Tensor& q) {
    grid.column(k, w, q);
    if (keep_t.defined()) q.mul_(keep_t.select(0, k));
  }
};

}  // namespace

Solution awp_plus(const Problem& problem) {
  constexpr int kPasses = 10;
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  Support support{{}, W};
  if (problem.pattern.kind != Pattern::Kind::none) {
    support = choose_support(W, C, problem.pattern);
    support.weight = least_squares(W, C, support.keep, support.weight);
  }
  if (problem.grid.bits == 0) return stored(support.weight, support.keep);

  const Factor factor = inverse_factor(C, problem.options.damping);
  SweepGrid grid(W.size(0), W.size(1), problem.grid, W);
  const int64_t units[] = {grid.unit()};
  const at::Tensor keep_t = support.keep.defined() ? support.keep.t().contiguous() : at::Tensor();
  obs_sweep(support.weight.t().clone(at::MemoryFormat::Contiguous), factor.U, problem.options.block, units,
            RoundingOnSupport{grid, keep_t});
  return stored(descend_codes(W, C, problem.grid, grid.rounded(), support.keep, kPasses), problem.grid, support.keep);
}

}  // namespace lacuna::solver
