// src/solver/rtn.h - round to nearest on the min-max grid of every group.
#pragma once

#include "solver/solve.h"

namespace lacuna::solver {

Solution rtn(const Problem& problem);

}  // namespace lacuna::solver
