// src/model/cuda_block.h - Block (block.h) on an NVIDIA device: one layer after the other of a decoder there, whose
// matrices read inputs of their own.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/cuda/device.h"
#include "model/block.h"

namespace lacuna::model {

class CudaShard;
struct Group;

/// Runs T = windows * window rows, each window from position 0, through one layer at a time. Products as batches of
/// the decoder make them. Uses the decoder's work space and the layer's key-value cache.
class CudaBlock {
 public:
  /// shard: of a decoder that is not split; outlives this. Tokens before position dense_prefix of a window are never
  /// masked. Throws DoesNotFit.
  CudaBlock(CudaShard& shard, int64_t windows, int64_t window, int64_t dense_prefix);

  /// Then next() enters the first layer. ids: [T].
  void begin(std::span<const int32_t> ids);
  /// The next layer, which runs dense on what the one before made, dense.
  void next();

  bool has(Matrix matrix) const;
  int64_t weight_bytes(Matrix matrix) const;  // in the file
  /// Nothing is left out from now on.
  void restart();
  /// |y - dense|^2 / |dense - x|^2 of the layer's output y under masks that differ from those kept in `changed` alone.
  /// keep: they are the kept ones from now on. Masks of groups of inputs are not taken.
  double error(Matrix changed, const Block::Masks& masks, bool keep);

 private:
  /// Buffers of one pass, as Block::Pass. [T, width].
  struct Pass {
    float *qkv = nullptr, *attended = nullptr, *residual = nullptr, *ffn_in = nullptr, *up = nullptr,
          *ffn_down = nullptr, *out = nullptr;
  };
  const Group& group_of(Matrix matrix) const;
  /// Which of its group's parts a matrix is, and its outputs.
  size_t part_of(Matrix matrix) const;
  int64_t outputs_of(Matrix matrix) const;
  /// y[T, outputs], rows `stride` apart, = or += the matrix times `in` [T, K], masked.
  void linear(Matrix matrix, const float* in, const Block::Mask& mask, bool add, float* y, int64_t stride);
  void norm(const float* weight, const float* bias, float* x, float* y);
  void copy(const float* from, int64_t width, float* to);
  void attend(const Pass& pass);
  void rerun(std::span<const Matrix> changed, const Block::Masks& masks, const Pass& from, Pass& pass);
  /// |a - b|^2 of two results, [T, n_embd]. Waits for the device.
  double distance(const float* a, const float* b);

  CudaShard& shard_;
  int64_t windows_, window_, dense_prefix_, layer_ = -1;
  cuda::Buffer space_, norms_, parts_;
  float *x_ = nullptr, *attn_in_ = nullptr, *dense_out_ = nullptr, *rotated_ = nullptr, *masked_ = nullptr;
  Pass kept_, trial_;
  double scale_ = 0;
};

}  // namespace lacuna::model
