// src/solver/awp_plus.h - awp+: AWP's problem and projections with better steps.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// Pruning: a support by preconditioned iterations (support.h), then least squares on it. Quantizing: GPTQ's sweep,
/// then coordinate descent on its codes. Both: support, least squares, a sweep that rounds on the support, coordinate
/// descent. Without options.search_ranges every group keeps the grid that its weights span when the sweep comes to it:
/// so that its largest weights are within reach, and scales stay.
Solution awp_plus(const Problem& problem);

}  // namespace lacuna::solver
