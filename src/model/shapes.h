// src/model/shapes.h - facts of well-known models, so that speed can be measured without their weights.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

/// Weights of a layer that read one input.
struct LinearGroupShape {
  std::string name;              // "q+k+v"
  int64_t K;                     // inputs
  std::vector<int64_t> outputs;  // N of each
};
struct LinearLayers {
  std::string name;
  int64_t n_layers;
  std::vector<LinearGroupShape> groups;  // of one layer
};
/// The linear layers of a model without its head.
LinearLayers linear_layers(const ModelShape& shape);
/// The same of a known shape's name; "NxK", such as 4096x11008: layers of that one matrix, so many that they take 256
/// MiB at 2 bits a weight, which is several times what a device's cache holds. Throws Error for anything else.
LinearLayers linear_layers(std::string_view name);

}  // namespace lacuna::model
