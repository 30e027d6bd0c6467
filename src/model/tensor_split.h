// src/model/tensor_split.h - tensor parallelism: every layer's matrices split over shards (Megatron-LM,
// arXiv:1909.08053, section 3). q, k and v are split by heads, gate and up by outputs, o and down by the inputs that
// these make: a shard computes its part of a half block alone, and the sum of all shards' results is the half block's.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/linear.h"
#include "layout/slice.h"
#include "model/config.h"
#include "model/sparsity.h"

namespace lacuna::model {

/// A layer's matrices by the input that they read, in the order of Input; q, k, v in one, gate and up in one.
using LayerWeights = std::array<std::vector<kernels::WeightView>, kInputs>;

/// [first, first + count)
struct Share {
  int64_t first = 0, count = 0;
  friend bool operator==(const Share&, const Share&) = default;
};

/// A matrix that a shard has. The view's bytes are `bytes`, or those of the file.
struct ShardWeight {
  kernels::WeightView view;
  std::vector<std::byte> bytes;
};

class TensorSplit {
 public:
  /// Shares are as even as the layouts' blocks allow. Throws Error naming the tensor and the numbers of shards that
  /// work where a shard would get no whole head or no whole block.
  TensorSplit(const Config& config, std::span<const LayerWeights> layers, int64_t shards);

  int64_t shards() const { return int64_t(kv_heads_.size()); }
  Share kv_heads(int64_t shard) const { return kv_heads_[size_t(shard)]; }  // of every layer
  Share heads(int64_t shard) const { return scaled(kv_heads(shard), heads_of_kv_); }
  Share ff(int64_t shard) const { return ff_[size_t(shard)]; }
  /// Of the values of an input: all of them, or those that the shard makes itself.
  Share inputs(int64_t shard, Input input) const;
  /// Outputs of a matrix of `N` rows that are split evenly, in whole fours: the head's.
  Share rows(int64_t shard, int64_t N) const;

  /// A shard's part of the matrices that read `input`, without bytes: shapes, params, biases. The biases of o and down
  /// are the first shard's.
  std::vector<kernels::WeightView> outline(const LayerWeights& layer, Input input, int64_t shard) const;
  /// The same with bytes.
  std::vector<ShardWeight> cut(const LayerWeights& layer, Input input, int64_t shard, ThreadPool& pool) const;
  /// Outputs `rows` of a matrix in a layout whose rows lie apart.
  ShardWeight cut_rows(const kernels::WeightView& weight, Share rows, ThreadPool& pool) const;

 private:
  static Share scaled(Share share, int64_t by) { return {share.first * by, share.count * by}; }
  layout::Slice slice(const kernels::WeightView& weight, size_t part, Input input, int64_t shard) const;

  int64_t n_embd_, heads_of_kv_, head_dim_;
  std::vector<Share> kv_heads_, ff_;
};

}  // namespace lacuna::model
