#include "compress/bqpo.h"

#include "solver/project.h"

namespace lacuna::compress {
namespace {

solver::Solution solution_of(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid) {
  const at::Tensor kept = solver::masked(W.detach(), keep);
  if (grid.bits == 0) return solver::stored(kept, keep);
  return solver::stored(solver::round_to_grid(kept, grid, solver::fit_grid(kept, grid)), grid, keep);
}

}  // namespace

at::Tensor fake_quantize(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid) {
  const at::Tensor kept = solver::masked(W, keep);
  if (grid.bits == 0) return kept;
  const at::Tensor w = solver::grouped(kept, grid.group(W.size(1)));
  const at::Tensor low = w.amin({2}, true).clamp_max(0), high = w.amax({2}, true).clamp_min(0);
  return solver::masked(quantize_on_range(kept, low, high, grid), keep);
}

TrainingReport bqpo(const Block& block, const TrainingOptions& options, Solutions& solutions) {
  Weights W;
  Trainee trainee{.name = "block optimisation", .rate_flag = "--bqpo-lr"};
  for (size_t m = 0; m < W.size(); ++m) {
    if (!solutions[m].weight.defined()) continue;
    const at::Tensor& from = solutions[m].unrounded.defined() ? solutions[m].unrounded : block.layer.weight[m];
    W[m] = solver::masked(from, solutions[m].keep).detach().clone();
    W[m].set_requires_grad(true);
    trainee.parameters.push_back(W[m]);
  }
  trainee.weights = [&] {
    Weights out;
    for (size_t m = 0; m < W.size(); ++m)
      if (W[m].defined()) out[m] = fake_quantize(W[m], solutions[m].keep, block.grid);
    return out;
  };
  trainee.solutions = [&] {
    Solutions out;
    for (size_t m = 0; m < W.size(); ++m)
      if (W[m].defined()) out[m] = solution_of(W[m], solutions[m].keep, block.grid);
    return out;
  };
  return train_block(block, options, trainee, solutions);
}

}  // namespace lacuna::compress
