// src/solver/awp_plus.h - awp+: AWP's problem and projections with better steps.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// Pruning: a support by preconditioned iterations (support.h), then least squares on it. Quantizing: GPTQ's sweep,
/// then coordinate descent on its codes. Both: support, least squares, a sweep that rounds on the support, coordinate
/// descent.
Solution awp_plus(const Problem& problem);

}  // namespace lacuna::solver
