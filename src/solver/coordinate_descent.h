// src/solver/coordinate_descent.h - the codes of a rounded matrix, changed one column at a time to what loses least.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "solver/problem.h"
#include "solver/project.h"

namespace lacuna::solver {

enum class Scales : uint8_t { refitted, fixed };

/// Cyclic coordinate descent on tr((W - Q) C (W - Q)^T), Q = decode(rounded) where kept, 0 elsewhere: for one input
/// after the other, every row takes the code that loses least while its others stay; zeros of the grids stay. Unless
/// scales are fixed, between two passes every group's scale becomes the f16 value next to its least-squares one, where
/// that loses less. The loss never grows (but for rounding); it ends early where a pass changes no code. keep: [N, K]
/// or undefined.
Rounded descend_codes(const at::Tensor& W, const at::Tensor& C, const Grid& grid, const Rounded& start,
                      const at::Tensor& keep, int passes, Scales scales = Scales::refitted);

}  // namespace lacuna::solver
