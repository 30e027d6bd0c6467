#include "solver/wanda.h"

#include "solver/project.h"

namespace lacuna::solver {

at::Tensor wanda_score(const at::Tensor& W, const at::Tensor& C) { return W.abs() * C.diagonal().sqrt(); }

Solution wanda(const Problem& problem) {
  const at::Tensor score = wanda_score(problem.W, problem.stats.second_moment);
  return stored(problem.W, keep_mask(score, problem.pattern));
}

}  // namespace lacuna::solver
