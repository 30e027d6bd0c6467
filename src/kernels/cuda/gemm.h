// src/kernels/cuda/gemm.h - y[M, N] = x[M, K] W[N, K]^T (+ bias) of many tokens, on tensor cores. Plain C++.
//
// Both matrices are first written as operands: f16, each row times a power of two of its own, so that neither large
// activations nor small weights leave f16's range. Weights are brought into this form from what the decoder has on the
// device (columns or rows), a slice at a time, for one product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows.h"
#include "layout/layout.h"

namespace lacuna::cuda {

/// A matrix [rows, K] as the tensor cores read it: element = f16 value * scale[row].
/// Tiles of 128 rows and 64 columns, 16 KiB each, [ceil(rows / 128)][ceil(K / 64)]. A tile's row is 128 bytes; its
/// piece p of 8 columns lies at place p ^ (row % 8), so that neither ldmatrix nor wgmma meets a bank twice. Columns
/// from K on are zeros, rows from `rows` on are anything.
struct Operand {
  std::byte* tiles = nullptr;  // operand_bytes(rows, K), aligned to 128 bytes
  /// [rows]: the power of two that brings a row's largest magnitude to [2^14, 2^15); 1 where a value is not finite.
  float* scale = nullptr;
  int64_t rows = 0, K = 0;
};
inline constexpr int64_t kOperandRows = 128, kOperandColumns = 64;  // of a tile
int64_t operand_bytes(int64_t rows, int64_t K);

struct GemmInputs {
  Gate gate = Gate::none;     // what is done to x on the way
  const float* x = nullptr;   // [M, K], rows `stride` apart, aligned to 16 bytes
  const float* up = nullptr;  // as x, swiglu
  int64_t stride = 0;
  /// norm(x) * norm (+ norm_bias) is taken, as NormArgs says; nullptr: x.
  const float* norm = nullptr;  // [K]
  const float* norm_bias = nullptr;
  float eps = 0;
  Operand to;  // rows: M. Its scales are written too
};
/// The tokens' inputs as an operand; at most 65536 of each. Each value is off by 2^-11 of itself, or 2^-39 of its row's
/// largest.
void launch_gemm_inputs(const Device& device, Stream& stream, const GemmInputs& args);

/// scale[n] of every output as Operand::scale says; scale: [256 rows], or [N]. Once for each weight. Waits for nothing.
void launch_weight_scales(const Device& device, Stream& stream, const layout::Layout& layout, const Columns& weights,
                          float* scale);
void launch_weight_scales(const Device& device, Stream& stream, const Rows& weights, float* scale);

/// Outputs [first, first + to.rows) of a weight as an operand, each value rounded to f16 once. to.scale, of output
/// `first`, is read. first: a multiple of 256 for columns. Throws Error for a layout that no kernel reads.
void launch_gemm_weights(const Device& device, Stream& stream, const layout::Layout& layout, const Columns& weights,
                         int64_t first, const Operand& to);
void launch_gemm_weights(const Device& device, Stream& stream, const Rows& weights, int64_t first, const Operand& to);

enum class GemmKernel : uint8_t {
  best,   // of those that the device runs
  mma,    // compute capability 8.0 and later
  wgmma,  // 9.0
};
struct GemmArgs {
  Operand x, w;                 // of one K; rows: M and N
  const float* bias = nullptr;  // [N]
  bool add = false;             // y += instead of y =
  float* y = nullptr;           // [M, N], rows `stride` apart
  int64_t stride = 0;
  GemmKernel kernel = GemmKernel::best;
};
/// The product. Products of two f16 are exact and summed in f32 (by the tensor cores, which may cut instead of round:
/// up to 2^-23 of the largest sum for each 16 columns), so that an output is off by at most (2^-10 + K 2^-27) sum_k |x
/// w| and what operands lose: 2^-39 of the largest x and w of its rows for each column. Sums in a fixed order: every
/// run gives the same bits, and a token's results do not depend on the others. Where an input or a weight is not
/// finite, the outputs that it meets are not. Values of x from 2^90 on may count as infinite. Throws Error for a kernel
/// that does not run on the device.
void launch_gemm(const Device& device, Stream& stream, const GemmArgs& args);

}  // namespace lacuna::cuda
