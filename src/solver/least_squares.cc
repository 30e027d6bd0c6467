#include "solver/least_squares.h"

#include "solver/project.h"

namespace lacuna::solver {

at::Tensor least_squares(const at::Tensor& W, const at::Tensor& C, const at::Tensor& keep, const at::Tensor& start) {
  constexpr int kIterations = 60;
  const at::Tensor diagonal = C.diagonal(), norms = diagonal.masked_fill(diagonal <= 0, 1).sqrt();
  const at::Tensor H = C / norms / norms.unsqueeze(1);
  const at::Tensor Wn = W * norms;
  at::Tensor theta = masked(start.defined() ? start * norms : Wn, keep);
  at::Tensor residual = (Wn - theta).matmul(H);
  double loss = ((Wn - theta) * residual).sum(at::kDouble).item<double>();
  residual = masked(residual, keep);
  at::Tensor direction = residual.clone(), size = residual.square().sum(1, true);
  const at::Tensor nothing = at::zeros({}, W.options());
  for (int i = 0; i < kIterations; ++i) {
    const at::Tensor image = masked(direction.matmul(H), keep);
    const at::Tensor curvature = (direction * image).sum(1, true);
    const at::Tensor step = at::where(curvature > 0, size / curvature, nothing);
    theta.addcmul_(direction, step);
    residual.addcmul_(image, step, -1);
    const double gained = (step * size).sum(at::kDouble).item<double>();  // of the loss, by this iteration
    loss -= gained;
    if (!(gained > 1e-5 * loss)) break;
    const at::Tensor left = residual.square().sum(1, true);
    direction.mul_(at::where(size > 0, left / size, nothing)).add_(residual);
    size = left;
  }
  return theta / norms;
}

}  // namespace lacuna::solver
