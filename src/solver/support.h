// src/solver/support.h - which weights to keep, chosen with their values free to adapt.
#pragma once

#include <ATen/ATen.h>

#include "solver/problem.h"

namespace lacuna::solver {

struct Support {
  at::Tensor keep;    // [N, K] bool
  at::Tensor weight;  // [N, K], 0 where dropped
};

/// Alternating directions for min tr((W - X) C (W - X)^T) with X = Z, Z in the pattern, in inputs scaled to unit second
/// moment: X = W + rho (Z - U - W) (C + rho I)^-1, Z = projection of X + U, U += X - Z. The sparsity rises over the
/// first iterations, rho in levels; 60 products of [N, K] and [K, K] in all, 6 inverses of [K, K].
Support choose_support(const at::Tensor& W, const at::Tensor& C, const Pattern& pattern);

}  // namespace lacuna::solver
