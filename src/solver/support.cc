#include "solver/support.h"

#include <algorithm>
#include <cmath>

#include "solver/factor.h"
#include "solver/project.h"

namespace lacuna::solver {

Support choose_support(const at::Tensor& W, const at::Tensor& C, const Pattern& pattern) {
  // Measured on layers of a trained model at 50% and 80%: a small rho finds better supports but does not settle, a
  // large one settles early on what magnitude says; rising from 0.1 to 2 beats every constant.
  constexpr int kLevels = 6, kEach = 10, kRamp = 15;
  constexpr double kFirst = 0.1, kLast = 2;
  const at::Tensor diagonal = C.diagonal(), dead = diagonal <= 0, norms = diagonal.masked_fill(dead, 1).sqrt();
  const at::Tensor H = C / norms / norms.unsqueeze(1), Wn = (W * norms).masked_fill(dead, 0);
  at::Tensor Z = Wn, U = at::zeros_like(Wn), keep;
  for (int level = 0, t = 1; level < kLevels; ++level) {
    const double growth = std::pow(kLast / kFirst, 1.0 / (kLevels - 1)), rho = kFirst * std::pow(growth, level);
    const at::Tensor inverse = damped_inverse(H, rho) * rho;
    if (level > 0) U.mul_(1 / growth);  // U is the multiplier over rho
    for (int i = 0; i < kEach; ++i, ++t) {
      const double share = 1 - std::pow(1 - std::min(1.0, double(t) / kRamp), 3);
      const at::Tensor wanted = at::addmm(Wn, Z - U - Wn, inverse).add_(U);  // X + U
      keep = keep_mask(wanted.abs(), ramped(pattern, share));
      Z = masked(wanted, keep);
      U = wanted.sub_(Z);
    }
  }
  return {keep, Z / norms};
}

}  // namespace lacuna::solver
