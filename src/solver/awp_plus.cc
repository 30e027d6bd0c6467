#include "solver/awp_plus.h"

#include "solver/coordinate_descent.h"
#include "solver/factor.h"
#include "solver/least_squares.h"
#include "solver/obs_sweep.h"
#include "solver/project.h"
#include "solver/support.h"
#include "solver/wanda.h"

namespace lacuna::solver {
namespace {

at::Tensor row_losses(const at::Tensor& W, const at::Tensor& theta, const at::Tensor& C) {
  const at::Tensor difference = W - theta;
  return (difference.matmul(C) * difference).sum(1, true);
}

/// The better of two: row by row where the pattern binds rows one by one, else of the matrix.
Support better_of(const Support& a, const Support& b, const Problem& problem) {
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  at::Tensor lost_a = row_losses(W, a.weight, C), lost_b = row_losses(W, b.weight, C);
  if (problem.pattern.kind != Pattern::Kind::row && problem.pattern.kind != Pattern::Kind::n_m) {
    lost_a = lost_a.sum().reshape({1, 1}), lost_b = lost_b.sum().reshape({1, 1});
  }
  const at::Tensor second = lost_b < lost_a;
  return {at::where(second, b.keep, a.keep), at::where(second, b.weight, a.weight)};
}

/// What is kept, with the values that lose least. Where next to nothing is kept the iterations can end at a worse
/// support than Wanda's: that is tried too.
Support prune(const Problem& problem) {
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  Support iterated = choose_support(W, C, problem.pattern);
  iterated.weight = least_squares(W, C, iterated.keep, iterated.weight);
  Support plain{keep_mask(wanda_score(W, C), problem.pattern), {}};
  plain.weight = least_squares(W, C, plain.keep);
  return better_of(iterated, plain, problem);
}

/// Rounds the columns of `weight`, whose dropped weights stay 0, in a sweep.
Rounded sweep(const Problem& problem, const Factor& factor, const at::Tensor& weight, const at::Tensor& keep) {
  // 1 / U_kk^2: what a squared error of column k costs once the columns right of it have made up for it.
  const bool search = problem.options.search_ranges;
  const at::Tensor importance = search ? factor.U.diagonal().square().reciprocal() : at::Tensor();
  SweepGrid grid(weight.size(0), weight.size(1), problem.grid, weight, importance);
  const at::Tensor keep_t = keep.defined() ? keep.t().contiguous() : at::Tensor();
  obs_sweep(weight.t().clone(at::MemoryFormat::Contiguous), factor.U, problem.options.block, nullptr, &grid, keep_t);
  return grid.rounded();
}

}  // namespace

Solution awp_plus(const Problem& problem) {
  constexpr int kPasses = 10;
  const at::Tensor &W = problem.W, &C = problem.stats.second_moment;
  const Support support = problem.pattern.kind == Pattern::Kind::none ? Support{{}, W} : prune(problem);
  if (problem.grid.bits == 0) return stored(support.weight, support.keep);

  const Factor factor = inverse_factor(C, problem.options.damping);
  Rounded rounded = sweep(problem, factor, support.weight, support.keep);
  if (support.keep.defined()) {
    // Values that make up for what is dropped spread wider than W's own: on coarse grids those can be the better start.
    const Rounded plain = sweep(problem, factor, masked(W, support.keep), support.keep);
    const auto lost = [&](const Rounded& r) { return row_losses(W, masked(decode(r, problem.grid), support.keep), C); };
    const at::Tensor second = lost(plain) < lost(rounded);
    rounded = {at::where(second, plain.code, rounded.code),
               {at::where(second, plain.affine.scale, rounded.affine.scale),
                at::where(second, plain.affine.zero, rounded.affine.zero)}};
  }
  const Scales scales = problem.options.search_ranges ? Scales::refitted : Scales::fixed;
  Solution solution =
      stored(descend_codes(W, C, problem.grid, rounded, support.keep, kPasses, scales), problem.grid, support.keep);
  if (support.keep.defined()) solution.unrounded = support.weight;
  return solution;
}

}  // namespace lacuna::solver
