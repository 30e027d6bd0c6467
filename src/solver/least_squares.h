// src/solver/least_squares.h - the best values for given positions.
#pragma once

#include <ATen/ATen.h>

namespace lacuna::solver {

/// Theta with Theta = 0 off `keep` that minimises tr((W - Theta) C (W - Theta)^T), every row by itself: conjugate
/// gradients on all rows at once, in inputs scaled to unit second moment, until an iteration gains less than 1e-5 of
/// the loss that is left (at most 60). start: where they begin, 0 off `keep`; undefined: W where kept.
at::Tensor least_squares(const at::Tensor& W, const at::Tensor& C, const at::Tensor& keep,
                         const at::Tensor& start = {});

}  // namespace lacuna::solver
