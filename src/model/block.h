// src/model/block.h - one layer of a decoder whose matrices read inputs of their own: what the search for thresholds
// varies.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/linear.h"
#include "kernels/ops.h"
#include "model/config.h"
#include "model/layer_ops.h"
#include "model/sparsity.h"

namespace lacuna::model {

enum class Matrix : uint8_t { q, k, v, o, gate, up, down };  // gate only of gated nets
inline constexpr int64_t kMatrices = 7;
/// The input that a matrix reads.
Input input_of(Matrix matrix);
/// Tensor name without ".weight": "blk.3.attn_q".
std::string tensor_name(int64_t layer, Matrix matrix);

/// Runs windows of `window` tokens, each from position 0, through one layer: T = windows * window rows.
class Block {
 public:
  Block(const io::Checkpoint& checkpoint, const Config& config, int64_t layer, int64_t windows, int64_t window,
        ThreadPool& pool);
  ~Block();

  /// Inactive inputs of one matrix.
  struct Mask {
    float t = 0;
    const float* norms = nullptr;  // [K]; nullptr: magnitude
    int64_t group = 1;             // inputs that are left out together
  };
  using Masks = std::array<Mask, kMatrices>;  // by Matrix

  /// Buffers of one pass. Every result is [T, width].
  struct Pass {
    std::vector<float> attn_in, q, k, v, attended, residual, ffn_in, gate, up, ffn_down, out;
  };
  /// The whole layer. x: [T, n_embd]. Tokens before position `dense_prefix` of a window are never masked.
  void run(const float* x, const Masks& masks, int64_t dense_prefix, Pass& pass);
  /// The same when only the masks of `changed` differ from those that `from` was made with: computes what depends on
  /// them into `pass`, whose other buffers are meaningless afterwards. pass may be `from`.
  void rerun(const float* x, std::span<const Matrix> changed, const Masks& masks, int64_t dense_prefix,
             const Pass& from, Pass& pass);

  bool has(Matrix matrix) const { return groups_[size_t(matrix)] != nullptr; }
  int64_t weight_bytes(Matrix matrix) const { return bytes_[size_t(matrix)]; }  // in the file
  int64_t tokens() const { return windows_ * window_; }

 private:
  void linear(Matrix matrix, const std::vector<float>& in, const Mask& mask, int64_t dense_prefix,
              std::vector<float>& out);
  void attend(const Pass& projections, std::vector<float>& attended);

  const Config& config_;
  ThreadPool& pool_;
  int64_t windows_, window_;
  NormWeights attn_norm_, ffn_norm_;
  std::vector<float> q_norm_, k_norm_;
  std::array<std::unique_ptr<kernels::LinearGroup>, kMatrices> groups_;
  std::array<std::vector<float>, kMatrices> biases_;
  std::array<int64_t, kMatrices> bytes_ = {}, widths_ = {};  // outputs
  std::vector<float> cos_, sin_, masked_, rotated_q_, rotated_k_;
  HugeBuffer cache_;
};

/// L2 norms of the columns of all matrices that read `input`, concatenated: [K].
std::vector<float> column_norms(const io::Checkpoint& checkpoint, const Config& config, int64_t layer, Input input,
                                ThreadPool& pool);

}  // namespace lacuna::model
