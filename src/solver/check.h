// src/solver/check.h - what can be wrong with a problem, said before it is solved.
#pragma once

#include <ATen/ATen.h>

#include <functional>

#include "solver/solve.h"

namespace lacuna::solver {

/// Throws Error when the method does not do what is asked for, or when no matrix has such a grid or pattern.
void check_request(const Method& method, const Grid& grid, const Pattern& pattern);

/// check_request, options and tensors. Throws Error, which says what is wrong and where.
void check_problem(const Method& method, const Problem& problem);

/// Multiplies two 256 x 256 float matrices and compares with a plain double loop; throws Error where they differ by
/// more than rounding can: some BLAS builds choose kernels that are wrong on processors that they do not know.
void check_product(const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& multiply);

/// check_product of this process's CPU product, once.
void check_blas();

/// Billions of operations a second in products of 512 x 512 float matrices on the CPU.
double product_gflops();

}  // namespace lacuna::solver
