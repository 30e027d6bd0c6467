// src/io/hf_config.h - a Hugging Face config.json as GGUF metadata.
//
// Keys as llama.cpp's converter writes them ({arch}.block_count, {arch}.rope.freq_base, ...), {arch} being "llama"
// (also for Mistral), "qwen2", "qwen3" or "opt". Beyond the converter's:
//   {arch}.attention.sliding_window     only where the model really uses one window in every layer
//   {arch}.rope.scaling.type "llama3"   with .factor .low_freq_factor .high_freq_factor .original_context_length; a
//                                       GGUF file has the tensor rope_freqs.weight instead
//   {arch}.rope.scaling.yarn_attn_factor  where the file names an attention_factor, the whole factor on cos and sin:
//   that
//                                       divided by the usual 0.1 ln(factor) + 1
// OPT (no architecture of llama.cpp): the usual sizes and
//   opt.attention.layer_norm_epsilon 1e-5, opt.position_offset 2, opt.word_embed_proj_dim, opt.do_layer_norm_before,
//   opt.final_layer_norm (the one after the last layer), opt.activation_function ("relu")
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "io/metadata.h"

namespace lacuna::io {

struct HfConfig {
  Metadata metadata;
  std::string model_type;  // "llama", "mistral", "qwen2", "qwen3", "opt"
  std::string architecture;
  int64_t block_count = 0, vocab_size = 0;
  bool tied = false;  // the output head is the embedding
  /// How another program quantized the weights: "quantization_config" or the older "compression_config"; null: it did
  /// not.
  nlohmann::json quantization;
  std::string quantization_key;
  std::vector<std::string> quantization_rules;  // the keys of its "dynamic", in the order of the file
};

/// Throws Error for a model type that is not one of the above (lists them) and for every option that this program does
/// not run.
HfConfig read_hf_config(std::string_view text, const std::string& where);

}  // namespace lacuna::io
