// src/io/quantize.h - stores a model's matrices in another layout: any checkpoint in, one GGUF file out.
//
// Which tensor gets which layout (unless `pure`):
//   vectors (norms, biases)        f32
//   learned position embeddings    as in the source
//   the output head                `head_layout`, else q6_K where the layout asked for has fewer bits, else that
//   layout.
//                                  A tied model's head is its embedding table, so that one gets it.
//   the embedding table            `embedding_layout`, else the layout asked for (one row is read a token)
//   all other matrices             the layout asked for
// A layout that GGUF does not have itself (zigzag, gq, bm, gs, nm24_q4) is for the matrices that a token is multiplied
// with: embedding and head get what they would get if the K-quant of the same bits (zz4_k, gq4: q4_K; zz8: q8_0) had
// been asked for, so that the two files differ in nothing else; also with `pure`. Into gq, bm and gs weights are
// rounded to nearest (layout::round_to_grid). bm and nm24_q4 drop what is 0 in the source, a model that was pruned, gs
// its groups of nothing but zeros; they drop nothing else. That is llama.cpp's rule for the head; its Q4_K_M and Q4_K_S
// mixes also give some attn_v and ffn_down more bits, which this does not. With `match_source` a file's own mix is kept
// instead: every matrix that a token is multiplied with gets the zigzag layout of its own K-quant (else the smallest
// one with no fewer bits), embedding and head stay as they are. With `keep_source` every matrix keeps its layout and
// its bytes: another program's checkpoint (io/import.h) or several files become one file that holds the same values.
// Rows that do not fit a layout's blocks fall back (layout/fallback.h); the report names them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "layout/layout.h"

namespace lacuna::io {

struct QuantizeOptions {
  layout::Id layout = layout::Id::q4_K;
  layout::Params params = {};                                         // of `layout`
  std::map<std::string, layout::Params> tensor_params = {};           // of these tensors, in place of `params`
  std::optional<layout::Id> head_layout = {}, embedding_layout = {};  // row layouts
  bool pure = false;                                                  // every matrix in `layout`
  bool match_source = false;                                          // zigzag, each in its own bits; not `layout`
  bool keep_source = false;                                           // each as it is stored; not `layout`
  bool strict = false;                                                // a tensor that would fall back is an Error
  bool progress = true;
};

struct QuantizeReport {
  struct Tensor {
    std::string name;
    std::vector<int64_t> dims;
    const layout::Layout* source = nullptr;
    const layout::Layout* wanted = nullptr;
    const layout::Layout* stored = nullptr;  // differs from wanted: it fell back
    layout::Params params = {};              // of `stored`
    int64_t count = 0, bytes = 0;
  };
  std::vector<Tensor> tensors;
  int64_t params = 0, bytes = 0, file_bytes = 0;
  /// Names of quantized layouts that are decoded and quantized again; to f16 and wider nothing is lost.
  std::vector<std::string> requantized;

  double effective_bits() const { return params > 0 ? 8.0 * double(bytes) / double(params) : 0; }
  std::vector<const Tensor*> fell_back() const;
};

/// What would be stored, without writing anything. Throws Error in strict mode when a tensor falls back.
QuantizeReport plan_quantize(const Checkpoint& source, const QuantizeOptions& options);

/// Writes `path` (atomically; nothing is left on an error). A matrix is in memory at most once, in its new layout; gq,
/// bm and gs: and its codes as bytes (bm16, gs16: as floats). Between zigzag layouts that differ in tile_rows only,
/// superblocks are moved, not encoded again; a matrix that stays in its layout is copied. q and k rows of a Hugging
/// Face "llama" are put into GGUF's order of rotary pairs. Throws Error naming the tensor for NaN and infinity and for
/// values that the layout cannot hold; where `path` is the source's own file.
QuantizeReport quantize(const Checkpoint& source, const std::string& path, const QuantizeOptions& options,
                        ThreadPool& pool);

}  // namespace lacuna::io
