// src/solver/wanda.h - Wanda (arXiv:2306.11695): the largest |w_ij| ||x_j|| of each row stay.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// |w_ij| sqrt(C_jj): [N, K].
at::Tensor wanda_score(const at::Tensor& W, const at::Tensor& C);

Solution wanda(const Problem& problem);

}  // namespace lacuna::solver
