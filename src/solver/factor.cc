#include "solver/factor.h"

#include <tuple>

#include "core/error.h"

namespace lacuna::solver {
namespace {

struct Cholesky {
  at::Tensor L;        // lower, of what `order` makes of the damped C
  double damping = 0;  // in units of C
};

/// Factorizes C + damping I, its rows and columns in reverse order where `reversed`.
Cholesky factorize(const at::Tensor& C, double share, double most, bool reversed) {
  at::Tensor A = C.to(at::kDouble, false, true);
  at::Tensor diagonal = A.diagonal();
  const at::Tensor dead = dead_inputs(C);
  const int64_t live = C.size(0) - dead.sum().item<int64_t>();
  const double mean = live == 0 ? 1 : diagonal.sum().item<double>() / double(live);
  diagonal.masked_fill_(dead, mean);
  if (reversed) A = A.flip({0, 1});
  double wanted = share, added = 0;
  while (wanted <= most * 1.0001) {
    A.diagonal().add_(wanted * mean - added);
    added = wanted * mean;
    const auto [L, info] = at::linalg_cholesky_ex(A);
    if (info.item<int>() == 0) return {L, added};
    wanted = wanted > 0 ? 10 * wanted : 1e-6;
  }
  throw Error(
      "second moment of {} inputs: not positive semidefinite, Cholesky's factorization fails even with {} times the "
      "mean "
      "of the diagonal added to it; gather the statistics again, with more tokens",
      C.size(0), most);
}

}  // namespace

at::Tensor dead_inputs(const at::Tensor& C) { return C.diagonal() <= 0; }

Factor inverse_factor(const at::Tensor& C, double share, double most) {
  // With the order reversed C = R R^T for an upper triangular R: U is its inverse, no product of inverses is needed.
  const Cholesky cholesky = factorize(C, share, most, true);
  const at::Tensor R = cholesky.L.flip({0, 1});
  const at::Tensor identity = at::eye(C.size(0), R.options());
  return {at::linalg_solve_triangular(R, identity, true).to(at::kFloat).contiguous(), cholesky.damping};
}

at::Tensor damped_inverse(const at::Tensor& C, double damping_share) {
  return at::cholesky_inverse(factorize(C, damping_share, 10 + damping_share, false).L).to(at::kFloat).contiguous();
}

}  // namespace lacuna::solver
