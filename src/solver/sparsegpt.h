// src/solver/sparsegpt.h - SparseGPT (arXiv:2301.00774): the column sweep that drops weights; with bits it rounds what
// stays in the same sweep (section 3.5 of the paper).
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

/// Masks are chosen for 128 columns at a time (n:m: for m), where the sweep comes to them. The paper's is the pattern
/// `unstructured`: the share is dropped in each block of 128 columns over all rows; `row` drops it in each row of the
/// block. options.damping and options.block as in gptq.
Solution sparsegpt(const Problem& problem);

}  // namespace lacuna::solver
