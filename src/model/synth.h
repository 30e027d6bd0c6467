// src/model/synth.h - a complete GGUF file of a known shape with random weights, for measuring speed.
#pragma once

#include <cstdint>
#include <string>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "layout/layout.h"
#include "model/shapes.h"

namespace lacuna::model {

struct SynthOptions {
  layout::Id layout = layout::Id::q4_K;       // all matrices but the head; layouts that GGUF does not have: but the
                                              // embedding table too, which gets the K-quant of the same bits
  layout::Id head_layout = layout::Id::q6_K;  // output head, or a tied model's embedding table
  layout::Params params = {};                 // of `layout`
  double weight_sparsity = 0;                 // bm and gs layouts: share of each row that is dropped, 0 <= share < 1
  uint64_t seed = 0;
  int64_t n_layers = 0;  // 0: as the shape says
  bool progress = true;
};

/// Writes `path` and returns its size. Each matrix row is put together from runs of 256 weights drawn at random from a
/// pool of 2048 that were encoded once, normal with variance 1/K, so that activations keep their size from layer to
/// layer. Superblocks of zigzag layouts are drawn one by one from such a pool; their outputs past N are random too, and
/// the manifest holds the digest of the tensor's name and the seed. Rows of gq, bm and nm24_q4 are runs of 256 random
/// codes, of which each keeps the same share (to within one), with scales drawn for each group. Norm weights are 1. The
/// tokenizer is a stand-in of the right size: byte tokens and fillers. The same options give the same bytes for any
/// number of threads.
int64_t synthesize(const ModelShape& shape, const std::string& path, const SynthOptions& options, ThreadPool& pool);

/// The bytes of one matrix, random as those are; params: of random_params(), for the same weight_sparsity.
HugeBuffer random_matrix(const layout::Layout& layout, layout::Shape shape, layout::Params params, uint64_t seed,
                         ThreadPool& pool, double weight_sparsity = 0);

/// The params of a random matrix: those given, and what weight_sparsity makes of it. Throws Error for a sparsity that
/// the layout cannot have.
layout::Params random_params(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                             double weight_sparsity);

}  // namespace lacuna::model
