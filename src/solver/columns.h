// src/solver/columns.h - columns of weights fixed one after the other, each with what those before it left over: the
// inner loop of the column sweep (obs_sweep.h) and of coordinate descent on codes (coordinate_descent.h).
//
// Everything is transposed, [columns, N]: the N rows of a weight matrix, which do not depend on each other, are lanes
// of vectors on the CPU and threads on a GPU.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "solver/columns_raw.h"

namespace lacuna::solver {

/// What a column becomes: rounded, dropped, both or neither.
struct ColumnRule {
  at::Tensor scale, zero, step;  // [N]; step: the scale, 1 where that is 0. Undefined: not rounded
  int bits = 0;
  at::Tensor keep;  // [B, N] bool, of the block; undefined: nothing is dropped
};

/// B consecutive columns, of which some are fixed by each call. float32, on one device, contiguous but for factor.
struct ColumnBlock {
  at::Tensor values;   // [B, N] sweep: the columns; descent: C (W - Q). Of columns not fixed yet: kept up to date
  at::Tensor factor;   // [B, B] rows of any stride: from values[j] factor[k, j] left[k] is taken for every k before j
  at::Tensor stored;   // [B, N] what the columns are stored as; descent: also what they were before
  at::Tensor left;     // [B, N] sweep: column - stored; descent: stored - what it was before
  at::Tensor code;     // [B, N] where they are rounded
  at::Tensor inverse;  // [B] descent: a column is meant to be stored + values * inverse. Undefined: a sweep
};

/// Whether the program is built with nvcc, which fix_columns needs on a GPU.
bool columns_on_cuda();

/// Fixes columns [first, last) of the block, 0 <= first < last <= B, those before `first` being fixed, and brings the
/// values behind them up to date. The same result for any number of threads; another kind of processor rounds sums
/// otherwise. Throws Error for tensors on a GPU where !columns_on_cuda().
void fix_columns(const ColumnBlock& block, int64_t first, int64_t last, const ColumnRule& rule);

}  // namespace lacuna::solver
