// src/model/shapes.h - facts of well-known models, so that speed can be measured without their weights.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lacuna::model {

struct ModelShape {
  std::string_view name, architecture;
  int64_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab, n_ctx;
  double norm_eps;
  double rope_base;    // 0: learned positions
  double rope_factor;  // Llama 3.1 scaling, 1: none
  bool tied, qkv_bias;
};

std::span<const ModelShape> known_shapes();
/// Throws Error that lists the known names.
const ModelShape& find_shape(std::string_view name);

}  // namespace lacuna::model
