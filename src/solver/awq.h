// src/solver/awq.h - AWQ (arXiv:2306.00978): inputs that are large on average get finer steps, by scaling their columns
// before rounding.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// Scale search: s = mean |x|^alpha, alpha = 0, 1/20 .. 19/20, divided by sqrt(max s * min s); the one whose rounded
/// W s / s has the least loss. Clip search (options.search_ranges): every group's |w s| is limited to 1, 0.95 .. 0.55
/// of its largest, whichever has the least loss within the group's inputs. The answer stores W s rounded; its
/// input_scale is s. Several matrices that read the same inputs share one s when they are stacked along N.
Solution awq(const Problem& problem);

/// AWQ, then Wanda's mask on what it decodes to: the grid knows nothing of the mask.
Solution awq_wanda(const Problem& problem);

/// Wanda's mask, then AWQ of what it leaves.
Solution wanda_awq(const Problem& problem);

/// The input scales alone: of awq and awq_wanda, of wanda_awq.
at::Tensor awq_scale(const Problem& problem);
at::Tensor wanda_awq_scale(const Problem& problem);

}  // namespace lacuna::solver
