// src/compress/omniquant.h - learnable weight clipping (OmniQuant, arXiv:2308.13137, section 3.2, equation 2): weights
// stay as they are, how much of what each group spans its grid covers is trained, layer after layer.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "compress/block_training.h"
#include "solver/omniquant.h"
#include "solver/problem.h"

namespace lacuna::compress {

/// The paper's, section 4.1, but for epochs: 20, with 2 bits 40, over 128 windows of 2,048 tokens. With few windows,
/// larger steps.
inline constexpr TrainingOptions kOmniquant{.epochs = 0, .lr = 5e-3, .batch = 1};
inline int64_t omniquant_epochs(int bits) { return bits == 2 ? 40 : 20; }

/// A matrix whose groups' ranges are trained: two strengths for each group, through a sigmoid the shares of its largest
/// and of its smallest weight that the grid reaches to. Both begin at solver::kFirstStrength.
class LearnedRanges : public Parametrized {
 public:
  /// W: [N, K] float32, or double for tests of gradients.
  LearnedRanges(const at::Tensor& W, const solver::Grid& grid);
  int64_t N() const override { return W_.size(0); }
  int64_t K() const override { return W_.size(1); }
  /// Strengths of the upper and of the lower ends: [N, groups, 1].
  std::vector<at::Tensor> parameters() const override { return {high_, low_}; }
  /// What would be stored; gradients reach the strengths, rounding passes them through.
  at::Tensor rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const override;
  /// Of a float32 matrix.
  solver::Solution solution() const;

 private:
  at::Tensor W_;
  solver::Grid grid_;
  solver::Range whole_;
  at::Tensor high_, low_;
};

/// Trains the ranges of the matrices that have a solution, whose weights are the layer's.
TrainingReport omniquant(const Block& block, const TrainingOptions& options, Solutions& solutions);

}  // namespace lacuna::compress
