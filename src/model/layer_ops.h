// src/model/layer_ops.h - what a whole decoder and a block alone do in the same way.
#pragma once

#include <cstdint>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "model/config.h"

namespace lacuna::model {

struct NormWeights {
  std::vector<float> weight, bias;  // [K]; bias only of layer norms
};

/// The values of a vector in any layout.
std::vector<float> read_vector(const io::Tensor& tensor);
/// The model's kind of norm. in, out: [M, n_embd]; out may be in.
void apply_norm(const Config& config, ThreadPool& pool, const NormWeights& weights, const float* in, int64_t M,
                float* out);
/// The model's activation of n values: silu(gate) * up of gated nets, of others that of `up`, where gate is not read.
/// out may be either.
void apply_activation(const Config& config, ThreadPool& pool, const float* gate, const float* up, int64_t n,
                      float* out);
/// Cosines and sines of one position: [n_rot / 2] each.
void rotary_row(const Rope& rope, int64_t position, float* cos, float* sin);

}  // namespace lacuna::model
