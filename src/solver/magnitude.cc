#include "solver/magnitude.h"

#include "solver/project.h"

namespace lacuna::solver {

Solution magnitude(const Problem& problem) { return stored(problem.W, keep_mask(problem.W.abs(), problem.pattern)); }

}  // namespace lacuna::solver
