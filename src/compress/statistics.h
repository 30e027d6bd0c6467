// src/compress/statistics.h - what solvers learn about a layer's inputs, gathered while calibration text runs through
// it.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>

#include "model/sparsity.h"
#include "solver/problem.h"

namespace lacuna::compress {

/// How much each token of the calibration text counts.
struct TokenWeights {
  /// The first token of a window. Attention of trained models rests on it, which makes its hidden state unlike all
  /// others; where a layer is wrong there, it is wrong for the whole text, but it is one token of thousands.
  double first = 1;
  /// A token whose squared norm is larger than so many times its window's median is scaled down to that, so that the
  /// few with norms hundreds of times those of others do not decide alone; 0: none is, nor where the median is 0.
  double clip = 0;
};

/// Weighted sums over tokens for each of a layer's four inputs, in double: the second moment X X^T and |x|.
class StatisticsSums {
 public:
  explicit StatisticsSums(TokenWeights weights = {}) : weights_(weights) {}
  /// x: [tokens, K] float32, a window.
  void add(model::Input input, const at::Tensor& x);
  /// Divided by the tokens' weight; the sums of moments are let go. Throws Error naming `layer` when a sum is not
  /// finite.
  std::array<solver::Statistics, model::kInputs> finish(int64_t layer);
  /// Share of an input's squared values that lies in tokens of more than ten times their window's median.
  double outlier_share(model::Input input) const;

 private:
  struct Sum {
    at::Tensor moment, abs;            // [K, K], of which blocks on and right of the diagonal are summed; [K]
    double squares = 0, outliers = 0;  // of x as it is: all, and those of tokens far above the median
    int64_t tokens = 0;
    double weight = 0;  // of all tokens
  };
  TokenWeights weights_;
  std::array<Sum, model::kInputs> sums_;
};

}  // namespace lacuna::compress
