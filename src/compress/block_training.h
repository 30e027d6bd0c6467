// src/compress/block_training.h - training of one layer until it does what the dense one did, whatever is trained in
// it: weights (bqpo.h) or the ranges of their grids (omniquant.h).
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "compress/net.h"
#include "compress/parametrized.h"
#include "compress/statistics.h"
#include "solver/problem.h"

namespace lacuna::compress {

struct TrainingOptions {
  int64_t epochs = 0;  // over all windows; 0: the layer stays as the solver made it
  double lr = 1e-5;    // AdamW's, without weight decay
  int64_t batch = 1;   // windows of a step
};

struct TrainingReport {
  /// sum of w |y - t|^2 / sum of w |t|^2 over all tokens, t the dense layer's result: as the solver made it, as
  /// trained.
  double before = 0, after = 0;
  std::vector<double> epochs;  // the same, mean over the steps of each epoch, while parameters move
  bool kept = false;           // whether the trained layer was better
  double seconds = 0;
  int64_t device_bytes = 0;  // DeviceMemory::peak
};

/// Hidden states of a window: [1, tokens, n_embd].
using Window = std::function<at::Tensor(int64_t)>;
using Solutions = std::array<solver::Solution, model::kMatrices>;

/// A layer and what it is trained on. Tokens weigh as in the statistics: one of far larger norm counts less, the first
/// of a window more.
struct Block {
  const Net& net;
  const Layer& layer;  // dense, scales folded in
  solver::Grid grid;
  TokenWeights tokens;
  uint64_t seed = 0;  // order of the windows
  int64_t windows = 0;
  Window inputs;                               // of the layer
  Window targets;                              // the dense net's results
  std::function<void(int64_t)> after_windows;  // how many have run, for progress
};

/// What is trained in a layer.
struct Trainee {
  std::string_view name, rate_flag;                                 // for messages
  std::array<const Parametrized*, model::kMatrices> matrices = {};  // as they are now; nullptr: the layer's own
  std::function<Solutions()> solutions = {};                        // as they would be stored
};

/// Trains, and replaces the solutions where the trained ones lose less over all windows. Deterministic. Throws Error
/// when the loss is not finite.
TrainingReport train_block(const Block& block, const TrainingOptions& options, const Trainee& trainee,
                           Solutions& solutions);

/// W on the grids over [low, high] of its groups, [N, K], with gradients: scales and zero points come from the ranges
/// (as solver::fit_range has them), rounding passes gradients through, what is outside of a range has none.
/// low <= 0 <= high: [N, groups, 1].
at::Tensor quantize_on_range(const at::Tensor& W, const at::Tensor& low, const at::Tensor& high,
                             const solver::Grid& grid);

}  // namespace lacuna::compress
