// src/io/checkpoint.h - one view of a model on disk, whether a GGUF file (also split) or a Hugging Face folder.
//
// Both kinds present GGUF's tensor names (token_embd.weight, blk.3.attn_q.weight, ...) and GGUF's metadata keys; a
// Hugging Face folder's config.json, generation_config.json and tokenizer are translated into the keys that llama.cpp's
// converter would write, so that everything above reads one vocabulary of names. Weights stay in the mapped file, but
// for those that another program has quantized or pruned, which are put into our layouts in memory (io/import.h). One
// thing differs and is told: llama-type GGUF files hold the rows of attn_q and attn_k permuted for rotary pairs (2i,
// 2i+1); Hugging Face files do not (pairs i, i + d/2).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/vocabulary.h"
#include "io/metadata.h"
#include "layout/layout.h"

namespace lacuna::io {

/// A tensor in a mapped file. A vector of n values has shape {1, n}.
struct Tensor {
  std::string name;
  const layout::Layout* layout = nullptr;
  layout::Shape shape;               // [N, K] of a matrix; dims beyond two are folded into N
  std::vector<int64_t> dims;         // as in the file, slowest first (GGUF's ne reversed)
  std::span<const std::byte> bytes;  // canonical bytes, valid as long as the Checkpoint
  layout::Params params = {};        // of the layout, from lacuna.manifest or the importer
};

/// Of the keys that thresholds of activation sparsity have (model/sparsity.h).
inline constexpr std::string_view kThresholdPrefix = "lacuna.threshold.";

enum class Source : uint8_t { gguf, huggingface };
/// Which two elements of a head rotary embedding turns together.
enum class RopePairs : uint8_t { adjacent, halves };

class Checkpoint {
 public:
  /// Opens a .gguf file (any part of a split set) or a folder with config.json. Every offset, size and shape is checked
  /// here; Error otherwise. threads: that unpack what another program has quantized; 0: one per core.
  static Checkpoint open(const std::string& path, int threads = 0);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const;
  Source source() const;
  /// The architecture's name as GGUF spells it: "llama", "qwen2", "qwen3", "opt".
  std::string architecture() const;
  /// How q and k of this file are laid out: adjacent for GGUF "llama"; halves for the others and for Hugging Face
  /// folders.
  RopePairs rope_pairs() const;
  const Metadata& metadata() const;
  const Vocabulary& vocabulary() const;
  const std::vector<Tensor>& tensors() const;  // in file order
  const Tensor* find(std::string_view name) const;
  /// Throws Error naming the tensor and the file.
  const Tensor& require(std::string_view name) const;
  /// Takes these layers out, ascending numbers; those that stay are numbered anew, in names and metadata, as if the
  /// file held no others. Thresholds of activation sparsity go: they were found for the layers as they were. Throws
  /// Error for a number that is no layer's, and where none would stay.
  void drop_layers(std::span<const int64_t> layers);
  /// Bytes of all files that hold weights.
  int64_t file_bytes() const;
  /// What the user should know of the weights, a sentence each: what a quantized folder asks for and does not get.
  const std::vector<std::string>& warnings() const;

 private:
  struct Data;
  explicit Checkpoint(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

/// The reverse of what `Checkpoint` does with tokenizer.ggml.*: writes `vocabulary` as GGUF keys (used when a Hugging
/// Face folder becomes a GGUF file).
void vocabulary_to_metadata(const Vocabulary& vocabulary, Metadata& metadata);
Vocabulary vocabulary_from_metadata(const Metadata& metadata);

/// Row order that turns `halves` q/k weights into `adjacent` ones: row of the output -> row of the input, for n_heads
/// heads of head_dim rows.
std::vector<int64_t> rope_adjacent_rows(int64_t n_heads, int64_t head_dim);

}  // namespace lacuna::io
