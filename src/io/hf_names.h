// src/io/hf_names.h - Hugging Face tensor names as GGUF's.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lacuna::io {

/// "model.layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight"; empty for a tensor that no model needs
/// (rotary_emb.inv_freq). Throws Error naming an unknown tensor, or one of a layer that the model does not have.
std::string gguf_tensor_name(std::string_view architecture, int64_t block_count, std::string_view name,
                             const std::string& where);

}  // namespace lacuna::io
