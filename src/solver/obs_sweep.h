// src/solver/obs_sweep.h - column sweep of GPTQ (arXiv:2210.17323, Algorithm 1) and SparseGPT (arXiv:2301.00774,
// Algorithm 1): one loop, what columns become is an argument.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>

#include "solver/columns.h"
#include "solver/problem.h"
#include "solver/project.h"

namespace lacuna::solver {

/// End of the block of columns that starts at `first`: at most `block` columns, and no unit (a quantization group, a
/// group of a pattern) that starts behind `first` reaches past the end, so that its columns are up to date when the
/// sweep comes to it. units: sizes of the units, which start at their multiples.
int64_t block_end(int64_t first, int64_t K, int64_t block, std::span<const int64_t> units);

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
  /// The rule of column k's group, to which the caller adds what is dropped.
  ColumnRule rule(int64_t k) const;
  /// [K, N], filled by the sweep.
  const at::Tensor& code() const { return code_; }
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

/// Fixes one column after the other and pushes its error to the columns right of it, so that ||(W - Q) X||_F^2 grows
/// least. Wt: [K, N], the transposed weights, used up. U: [K, K], factor.h. grid rounds (GPTQ), mask drops (SparseGPT),
/// both do both; nullptr: not. keep_t: what is dropped where there is no mask to choose it, [K, N] or undefined.
/// Returns Q transposed, [K, N]. Deterministic.
at::Tensor obs_sweep(at::Tensor Wt, const at::Tensor& U, int64_t block, SweepMask* mask, SweepGrid* grid,
                     const at::Tensor& keep_t = {});

}  // namespace lacuna::solver
