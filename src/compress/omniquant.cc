#include "compress/omniquant.h"

#include <optional>

namespace lacuna::compress {

LearnedRanges::LearnedRanges(const at::Tensor& W, const solver::Grid& grid)
    : W_(W), grid_(grid), whole_(solver::range_of(W, grid)) {
  high_ = at::full_like(whole_.high, solver::kFirstStrength).set_requires_grad(true);
  low_ = at::full_like(whole_.low, solver::kFirstStrength).set_requires_grad(true);
}

solver::Range LearnedRanges::range() const { return {whole_.low * low_.sigmoid(), whole_.high * high_.sigmoid()}; }

at::Tensor LearnedRanges::weight() const {
  const solver::Range now = range();
  return quantize_on_range(W_, now.low, now.high, grid_);
}

solver::Solution LearnedRanges::solution() const { return solver::round_on_range(W_, range(), grid_); }

TrainingReport omniquant(const Block& block, const TrainingOptions& options, Solutions& solutions) {
  std::array<std::optional<LearnedRanges>, model::kMatrices> ranges;
  Trainee trainee{.name = "learning of ranges", .rate_flag = "--omniquant-lr"};
  for (size_t m = 0; m < ranges.size(); ++m) {
    if (!solutions[m].weight.defined()) continue;
    ranges[m].emplace(block.layer.weight[m], block.grid);
    for (const at::Tensor& strength : ranges[m]->parameters()) trainee.parameters.push_back(strength);
  }
  trainee.weights = [&] {
    Weights out;
    for (size_t m = 0; m < ranges.size(); ++m)
      if (ranges[m]) out[m] = ranges[m]->weight();
    return out;
  };
  trainee.solutions = [&] {
    Solutions out;
    for (size_t m = 0; m < ranges.size(); ++m)
      if (ranges[m]) out[m] = ranges[m]->solution();
    return out;
  };
  return train_block(block, options, trainee, solutions);
}

}  // namespace lacuna::compress
