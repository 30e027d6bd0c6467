// src/compress/statistics.h - what solvers learn about a layer's inputs, gathered while calibration text runs through
// it.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>

#include "model/sparsity.h"
#include "solver/problem.h"

namespace lacuna::compress {

/// Sums over tokens for each of a layer's four inputs, in double: the second moment X X^T and |x|.
class StatisticsSums {
 public:
  /// x: [tokens, K] float32.
  void add(model::Input input, const at::Tensor& x);
  /// Divided by the number of tokens. Throws Error naming `layer` when a sum is not finite.
  std::array<solver::Statistics, model::kInputs> finish(int64_t layer) const;

 private:
  struct Sum {
    at::Tensor moment, abs;  // [K, K], of which blocks on and right of the diagonal are summed; [K]
    int64_t tokens = 0;
  };
  std::array<Sum, model::kInputs> sums_;
};

}  // namespace lacuna::compress
