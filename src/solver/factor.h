// src/solver/factor.h - what column sweeps and preconditioned iterations need of C.
#pragma once

#include <ATen/ATen.h>

namespace lacuna::solver {

/// Upper triangular U with (C + damping I)^-1 = U^T U, float32, computed in double.
struct Factor {
  at::Tensor U;        // [K, K]
  double damping = 0;  // what was added, in units of C
};

/// Inputs that the calibration text never used: C_jj = 0. -> [K] bool
at::Tensor dead_inputs(const at::Tensor& C);

/// C in double with the mean of the live diagonal in the place of dead entries (1 where all are dead), `share` of that
/// mean added to the diagonal; where Cholesky's factorization fails, 10 times as much, up to `most` times the mean.
/// Then Error. Dead inputs have no other entries, so that nothing flows to or from them.
Factor inverse_factor(const at::Tensor& C, double share, double most = 10);

/// (C + damping I)^-1, float32, computed in double; damping as above.
at::Tensor damped_inverse(const at::Tensor& C, double damping_share);

}  // namespace lacuna::solver
