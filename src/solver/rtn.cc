#include "solver/rtn.h"

#include "solver/project.h"

namespace lacuna::solver {

Solution rtn(const Problem& problem) {
  const Grid& grid = problem.grid;
  return stored(round_to_grid(problem.W, grid, fit_grid(problem.W, grid)), grid, {});
}

}  // namespace lacuna::solver
