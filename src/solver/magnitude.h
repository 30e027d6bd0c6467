// src/solver/magnitude.h - magnitude pruning: the largest |w| stay, ranked over what the pattern ranks over; the
// classic's is the whole matrix (unstructured).
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

Solution magnitude(const Problem& problem);

}  // namespace lacuna::solver
