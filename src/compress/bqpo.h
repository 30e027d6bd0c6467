// src/compress/bqpo.h - block quantization-pruning optimisation (GQSA, arXiv:2412.17560, section 3.3): the weights that
// a layer keeps are trained, with the rounding in the graph, until the layer does what the dense one did.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "compress/net.h"
#include "compress/statistics.h"
#include "solver/problem.h"

namespace lacuna::compress {

/// Defaults: the paper's, section 4.1. It trains on 4,096 windows of 2,048 tokens; with few windows, larger steps.
struct BqpoOptions {
  int64_t epochs = 0;  // over all windows; 0: the layer stays as the solver made it
  double lr = 1e-5;    // AdamW's, without weight decay
  int64_t batch = 2;   // windows of a step
};

struct BqpoReport {
  /// sum of w |y - t|^2 / sum of w |t|^2 over all tokens, t the dense layer's result: as the solver made it, as
  /// trained.
  double before = 0, after = 0;
  std::vector<double> epochs;  // the same, mean over the steps of each epoch, while weights move
  bool kept = false;           // whether the trained layer was better
  double seconds = 0;
};

/// Hidden states of a window: [1, tokens, n_embd].
using Window = std::function<at::Tensor(int64_t)>;

/// W on the grid that its own kept values span, [N, K], with gradients: scale and zero point are recomputed from W
/// (equations 1 to 3, and as solver::fit_grid has them), rounding passes gradients through. What is dropped is 0; a
/// group without kept weights is all 0. keep: [N, K] bool or undefined. grid.bits = 0: W where it is kept.
at::Tensor fake_quantize(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid);

/// Trains the matrices that have a solution; masks stay. Starts from what the solver rounded (Solution::unrounded, else
/// the layer's weights). inputs: what the layers before give now; targets: the dense layer's results. Tokens weigh as
/// in the statistics: one of far larger norm counts less, the first of a window more. Replaces the solutions by the
/// trained ones, on the same grid's form, where those lose less over all windows. Deterministic. after_windows: called
/// with how many windows have run, for progress. Throws Error when the loss is not finite.
BqpoReport bqpo(const Net& net, const Layer& layer, const solver::Grid& grid, const TokenWeights& tokens,
                const BqpoOptions& options, uint64_t seed, int64_t windows, const Window& inputs, const Window& targets,
                std::array<solver::Solution, model::kMatrices>& solutions,
                const std::function<void(int64_t)>& after_windows);

}  // namespace lacuna::compress
