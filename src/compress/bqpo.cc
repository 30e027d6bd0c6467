#include "compress/bqpo.h"

#include <array>
#include <optional>
#include <utility>

#include "solver/project.h"

namespace lacuna::compress {
namespace {

solver::Solution solution_of(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid) {
  const at::Tensor kept = solver::masked(W.detach(), keep);
  if (grid.bits == 0) return solver::stored(kept, keep);
  return solver::stored(solver::round_to_grid(kept, grid, solver::fit_grid(kept, grid)), grid, keep);
}

class TrainedWeight : public Parametrized {
 public:
  /// from, keep: [N, K]; keep may be undefined.
  TrainedWeight(const at::Tensor& from, at::Tensor keep, const solver::Grid& grid)
      : W_(solver::masked(from, keep).detach().clone().set_requires_grad(true)), keep_(std::move(keep)), grid_(grid) {}

  int64_t N() const override { return W_.size(0); }
  int64_t K() const override { return W_.size(1); }
  std::vector<at::Tensor> parameters() const override { return {W_}; }
  at::Tensor rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const override {
    return fake_quantize(parts[0], keep_.defined() ? keep_.narrow(0, first, rows) : keep_, grid_);
  }
  solver::Solution solution() const { return solution_of(W_, keep_, grid_); }

 private:
  at::Tensor W_, keep_;
  solver::Grid grid_;
};

}  // namespace

at::Tensor fake_quantize(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid) {
  const at::Tensor kept = solver::masked(W, keep);
  if (grid.bits == 0) return kept;
  const at::Tensor w = solver::grouped(kept, grid.group(W.size(1)));
  const at::Tensor low = w.amin({2}, true).clamp_max(0), high = w.amax({2}, true).clamp_min(0);
  return solver::masked(quantize_on_range(kept, low, high, grid), keep);
}

TrainingReport bqpo(const Block& block, const TrainingOptions& options, Solutions& solutions) {
  std::array<std::optional<TrainedWeight>, model::kMatrices> W;
  Trainee trainee{.name = "block optimisation", .rate_flag = "--bqpo-lr"};
  for (size_t m = 0; m < W.size(); ++m) {
    if (!solutions[m].weight.defined()) continue;
    const at::Tensor& from = solutions[m].unrounded.defined() ? solutions[m].unrounded : block.layer.weight[m];
    trainee.matrices[m] = &W[m].emplace(from, solutions[m].keep, block.grid);
    solutions[m].unrounded.reset();
  }
  trainee.solutions = [&] {
    Solutions out;
    for (size_t m = 0; m < W.size(); ++m)
      if (W[m]) out[m] = W[m]->solution();
    return out;
  };
  return train_block(block, options, trainee, solutions);
}

}  // namespace lacuna::compress
