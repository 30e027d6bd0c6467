// src/solver/awp_plus.h - awp+: AWP's problem and projections with better steps.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// Pruning: a support by preconditioned iterations (support.h), then least squares on it. Quantizing: GPTQ's sweep,
/// then coordinate descent on its codes. Both: support, least squares, a sweep that rounds on the support, coordinate
/// descent. Without options.search_ranges every group keeps the grid that its weights span when the sweep comes to it:
/// rounding then moves no weight of the largest far, whatever that loses elsewhere.
Solution awp_plus(const Problem& problem);

}  // namespace lacuna::solver
