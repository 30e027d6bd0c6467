// src/io/gguf_model.h - what a checkpoint of either kind looks like as a GGUF file: its keys, the order of its rows,
// the tensors that only GGUF has.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "layout/layout.h"

namespace lacuna::io {

/// A weight with two or more dimensions, as opposed to norms and biases.
inline bool is_matrix(const Tensor& tensor) { return tensor.dims.size() >= 2 && tensor.name.ends_with(".weight"); }

/// Name of the tensor that holds Llama 3.1's scaling of rotary frequencies in GGUF files.
inline constexpr std::string_view kRopeFactors = "rope_freqs.weight";
/// What each rotary frequency is divided by under that scaling, where the checkpoint has it as keys and not as a
/// tensor; empty for the others. A GGUF file made from such a checkpoint has to have the tensor.
std::vector<float> llama3_rope_factors(const Checkpoint& source);

/// The keys of a GGUF file made from `source` whose matrices are mostly in layout `id`: those of the source but what
/// belongs to its parts and packing, the vocabulary, and general.file_type where GGUF has one for the layout.
Metadata gguf_metadata(const Checkpoint& source, layout::Id id);

/// Row of the GGUF tensor -> row of the source's; empty: the same. q and k of a Hugging Face "llama" differ.
std::vector<int64_t> gguf_row_order(const Checkpoint& source, const Tensor& tensor);

}  // namespace lacuna::io
