// src/solver/gqsa.h - GQSA's one-shot form (arXiv:2412.17560, sections 3.1 and 3.2): whole groups of inputs dropped by
// their saliency, the rest rounded to nearest.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// Equation 4, s = w^2 / [H^-1]_ii^2, averaged over each group of pattern.group inputs of a row; groups of the whole
/// matrix are ranked together, so that rows keep different numbers of them, down to none. H = C with
/// options.damping times the mean of its diagonal added (H's unit does not change the order). The last group of a row
/// may be shorter. Other patterns than groups rank single weights by the same s. What is kept takes the asymmetric grid
/// of equations 1 to 3.
Solution gqsa(const Problem& problem);

/// [N, K]: sqrt(s) with the columns of a shorter last group scaled so that sums over groups rank as means do.
at::Tensor gqsa_score(const Problem& problem);

}  // namespace lacuna::solver
