// src/solver/gptq.h - GPTQ (arXiv:2210.17323): the column sweep that rounds, columns in their order.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// options.damping (0.01 of the mean diagonal) and options.block (128) as in the paper. Dead inputs are rounded to
/// nearest: the calibration text says nothing about them, other text may use them.
Solution gptq(const Problem& problem);

}  // namespace lacuna::solver
