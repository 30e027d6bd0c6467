// src/compress/bqpo.h - block quantization-pruning optimisation (GQSA, arXiv:2412.17560, section 3.3): the weights that
// a layer keeps are trained, with the rounding in the graph, until the layer does what the dense one did.
#pragma once

#include <ATen/ATen.h>

#include "compress/block_training.h"

namespace lacuna::compress {

/// The paper's, section 4.1, but for epochs. It trains on 4,096 windows of 2,048 tokens; with few windows, larger
/// steps.
inline constexpr TrainingOptions kBqpo{.epochs = 0, .lr = 1e-5, .batch = 2};

/// W on the grid that its own kept values span, [N, K], with gradients: scale and zero point are recomputed from W
/// (equations 1 to 3, and as solver::fit_grid has them), rounding passes gradients through. What is dropped is 0; a
/// group without kept weights is all 0. keep: [N, K] bool or undefined. grid.bits = 0: W where it is kept.
at::Tensor fake_quantize(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid);

/// Trains the matrices that have a solution; masks stay. Starts from what the solver rounded (Solution::unrounded, else
/// the layer's weights), which it lets go.
TrainingReport bqpo(const Block& block, const TrainingOptions& options, Solutions& solutions);

}  // namespace lacuna::compress
