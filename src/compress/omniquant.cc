#include "compress/omniquant.h"

#include <optional>

namespace lacuna::compress {

LearnedRanges::LearnedRanges(const at::Tensor& W, const solver::Grid& grid)
    : W_(W), grid_(grid), whole_(solver::range_of(W, grid)) {
  high_ = at::full_like(whole_.high, solver::kFirstStrength).set_requires_grad(true);
  low_ = at::full_like(whole_.low, solver::kFirstStrength).set_requires_grad(true);
}

at::Tensor LearnedRanges::rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const {
  const auto of = [&](const at::Tensor& x) { return x.narrow(0, first, rows); };
  return quantize_on_range(of(W_), of(whole_.low) * parts[1].sigmoid(), of(whole_.high) * parts[0].sigmoid(), grid_);
}

solver::Solution LearnedRanges::solution() const {
  return solver::round_on_range(W_, {whole_.low * low_.sigmoid(), whole_.high * high_.sigmoid()}, grid_);
}

TrainingReport omniquant(const Block& block, const TrainingOptions& options, Solutions& solutions) {
  std::array<std::optional<LearnedRanges>, model::kMatrices> ranges;
  Trainee trainee{.name = "learning of ranges", .rate_flag = "--omniquant-lr"};
  for (size_t m = 0; m < ranges.size(); ++m) {
    if (!solutions[m].weight.defined()) continue;
    trainee.matrices[m] = &ranges[m].emplace(block.layer.weight[m], block.grid);
  }
  trainee.solutions = [&] {
    Solutions out;
    for (size_t m = 0; m < ranges.size(); ++m)
      if (ranges[m]) out[m] = ranges[m]->solution();
    return out;
  };
  return train_block(block, options, trainee, solutions);
}

}  // namespace lacuna::compress
