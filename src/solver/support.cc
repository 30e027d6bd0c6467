#include "solver/support.h"

#include <algorithm>
#include <cmath>

#include "solver/factor.h"
#include "solver/project.h"

namespace lacuna::solver {

Support choose_support(const at::Tensor& W, const at::Tensor& C, const Pattern& pattern) {
  constexpr int kIterations = 60, kRamp = 15;
  constexpr double kRho = 0.3;
  const at::Tensor diagonal = C.diagonal(), dead = diagonal <= 0, norms = diagonal.masked_fill(dead, 1).sqrt();
  const at::Tensor H = C / norms / norms.unsqueeze(1), Wn = (W * norms).masked_fill(dead, 0);
  const at::Tensor inverse = damped_inverse(H, kRho) * kRho;
  at::Tensor Z = Wn, U = at::zeros_like(Wn), keep;
  for (int t = 1; t <= kIterations; ++t) {
    const double share = 1 - std::pow(1 - std::min(1.0, double(t) / kRamp), 3);
    const at::Tensor wanted = at::addmm(Wn, Z - U - Wn, inverse).add_(U);  // X + U
    keep = keep_mask(wanted.abs(), ramped(pattern, share));
    Z = masked(wanted, keep);
    U = wanted.sub_(Z);
  }
  return {keep, Z / norms};
}

}  // namespace lacuna::solver
