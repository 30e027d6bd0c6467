// src/solver/obs_sweep.h - column sweep of GPTQ (arXiv:2210.17323, Algorithm 1) and SparseGPT (arXiv:2301.00774,
// Algorithm 1): one loop, the projection is an argument.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>

#include "solver/problem.h"
#include "solver/project.h"

namespace lacuna::solver {

/// End of the block of columns that starts at `first`: at most `block` columns, and no unit (a quantization group, a
/// group of a pattern) that starts behind `first` reaches past the end, so that its columns are up to date when the
/// sweep comes to it. units: sizes of the units, which start at their multiples.
int64_t block_end(int64_t first, int64_t K, int64_t block, std::span<const int64_t> units);

/// Fixes one column after the other and pushes its error to the columns right of it, so that ||(W - Q) X||_F^2 grows
/// least. Wt: [K, N], the transposed weights, used up. U: [K, K], factor.h. `project` has
///   begin(k, Wt)      before column k: if a unit starts there, its columns Wt[k..] are up to date
///   column(k, w, q)   w: [N], what column k should be -> q: [N], what is stored
/// GPTQ rounds, SparseGPT masks, the joint method masks and rounds. Returns Q transposed, [K, N]. Deterministic.
template <class Project>
at::Tensor obs_sweep(at::Tensor Wt, const at::Tensor& U, int64_t block, std::span<const int64_t> units,
                     Project&& project) {
  const int64_t K = Wt.size(0);
  const at::Tensor share = U / U.diagonal().unsqueeze(1);  // [k, j]: of column k's error, what column j takes
  at::Tensor Q = at::empty_like(Wt);
  for (int64_t first = 0; first < K;) {
    const int64_t end = block_end(first, K, block, units);
    const at::Tensor errors = at::empty({end - first, Wt.size(1)}, Wt.options());
    for (int64_t k = first; k < end; ++k) {
      project.begin(k, Wt);
      const at::Tensor w = Wt.select(0, k);
      at::Tensor q = Q.select(0, k), error = errors.select(0, k - first);
      project.column(k, w, q);
      at::sub_out(error, w, q);
      if (k + 1 < end) {
        Wt.narrow(0, k + 1, end - k - 1).addr_(share.select(0, k).narrow(0, k + 1, end - k - 1), error, 1, -1);
      }
    }
    if (end < K) {
      Wt.narrow(0, end, K - end).addmm_(share.narrow(0, first, end - first).narrow(1, end, K - end).t(), errors, 1, -1);
    }
    first = end;
  }
  return Q;
}

/// Chooses what to drop while a sweep goes on: at the start of every unit of columns those of the smallest |w| / U_kk
/// (SparseGPT, equation 4) within the unit. Dead inputs go first.
class SweepMask {
 public:
  SweepMask(int64_t N, const at::Tensor& U, const at::Tensor& dead, const Pattern& pattern, int64_t block);
  int64_t unit() const { return unit_; }
  void begin(int64_t k, const at::Tensor& Wt);
  at::Tensor keep_t;  // [K, N] bool, true where not chosen yet

 private:
  Pattern pattern_;
  int64_t unit_;
  at::Tensor importance_;  // [K, 1]: 1 / U_kk, 0 for dead inputs
};

/// Rounds the columns of a sweep; every group's grid is fitted where the group starts, to what its weights are by then:
/// to their range, or, with `importance` ([K], of an input's squared error), to 1, 0.95 .. 0.2 of it, whichever loses
/// least in the group when nothing else moves.
class SweepGrid {
 public:
  SweepGrid(int64_t N, int64_t K, const Grid& grid, const at::Tensor& like, const at::Tensor& importance = {});
  int64_t unit() const { return group_; }
  /// keep_t: [K, N] or undefined; dropped weights do not widen the grid.
  void begin(int64_t k, const at::Tensor& Wt, const at::Tensor& keep_t);
  void column(int64_t k, const at::Tensor& w, at::Tensor& q);
  /// [N, K] and [N, groups].
  Rounded rounded() const;

 private:
  Affine fit(const at::Tensor& w, const at::Tensor& importance) const;

  Grid grid_;
  int64_t group_;
  at::Tensor importance_;           // [K, 1] or undefined
  at::Tensor code_;                 // [K, N]
  at::Tensor scale_, zero_, step_;  // [groups, N]; step: 1 where the scale is 0
};

}  // namespace lacuna::solver
