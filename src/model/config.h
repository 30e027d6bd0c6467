// src/model/config.h - hyperparameters of a decoder, from GGUF-style metadata.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace lacuna::model {

enum class Norm : uint8_t { rms, layer };
enum class Mlp : uint8_t { swiglu, relu };
enum class Positions : uint8_t { rope, learned };

/// Rotary frequencies. inv_freq already holds the scaling (linear, llama3, yarn); attention_factor multiplies cos and
/// sin.
struct Rope {
  std::vector<float> inv_freq;  // [n_rot / 2]
  float attention_factor = 1;
  int64_t n_rot = 0;
  bool adjacent = false;
};

struct Config {
  std::string architecture, name;
  int64_t n_layers = 0, n_embd = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, n_ff = 0, n_vocab = 0, n_ctx = 0;
  int64_t window = 0;  // sliding window, 0: none
  Norm norm = Norm::rms;
  float norm_eps = 1e-5f;
  bool qk_norm = false;
  bool norm_first = true;  // false: OPT-350m, norm after each half block
  Mlp mlp = Mlp::swiglu;
  Positions positions = Positions::rope;
  int64_t position_offset = 0;  // learned positions start at this row (OPT: 2)
  Rope rope;
};

/// Throws Error for an unknown architecture (lists the known ones), a missing key, or values that contradict each other
/// (heads not divisible...).
Config read_config(const io::Checkpoint& checkpoint);

}  // namespace lacuna::model
