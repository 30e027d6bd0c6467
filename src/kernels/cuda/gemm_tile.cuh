// src/kernels/cuda/gemm_tile.cuh - places in an operand's tiles, and what both GEMM kernels do with a sum. For .cu
// files only.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

inline constexpr int kTileRows = int(kOperandRows), kTileColumns = int(kOperandColumns);
inline constexpr int kTileRowBytes = kTileColumns * 2, kTileBytes = kTileRows * kTileRowBytes;

/// Bytes from a tile's start to piece p (8 columns) of a row.
__device__ __forceinline__ constexpr int tile_place(int row, int piece) {
  return row * kTileRowBytes + ((piece ^ (row % 8)) << 4);
}
/// Bytes from the operand's start; piece: of the whole row, K / 8.
__device__ __forceinline__ int64_t operand_place(int64_t row, int64_t piece, int64_t tiles_of_row) {
  return (row / kTileRows * tiles_of_row + piece / 8) * kTileBytes + tile_place(int(row % kTileRows), int(piece % 8));
}
inline int64_t tiles_of_row(int64_t K) { return (K + kTileColumns - 1) / kTileColumns; }

/// Operand::scale of a row whose largest magnitude has these bits (of a float; NaN is the largest).
__device__ __forceinline__ float scale_of(uint32_t bits) {
  const int exponent = int(bits >> 23);  // biased by 127
  if (exponent == 255 || bits == 0) return 1;
  return __uint_as_float(uint32_t(max(exponent, 27) - 14) << 23);
}
/// 1 / scale, for powers of two in float's normal range.
__device__ __forceinline__ float inverse_of(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) { return as_bits(__floats2half2_rn(low, high)); }

struct GemmParams {
  const std::byte *x, *w;
  const float *x_scale, *w_scale, *bias;
  float* y;
  int64_t stride;
  int M, N, tiles;  // tiles: of a row
  bool add, pairs;  // pairs: two neighbours of y may be written at once
};

/// Sums of outputs n and n + 1 (even) of token m become results.
__device__ __forceinline__ void store_pair(const GemmParams& p, int m, int n, float x_scale, float2 sums) {
  if (n >= p.N) return;
  float* const y = p.y + m * p.stride + n;
  const bool both = n + 1 < p.N;
  float a = sums.x * x_scale * __ldg(p.w_scale + n), b = both ? sums.y * x_scale * __ldg(p.w_scale + n + 1) : 0.0f;
  if (p.bias != nullptr) {
    a += __ldg(p.bias + n);
    if (both) b += __ldg(p.bias + n + 1);
  }
  if (both && p.pairs) {
    float2* const to = reinterpret_cast<float2*>(y);
    if (p.add) {
      const float2 before = *to;
      a += before.x, b += before.y;
    }
    *to = make_float2(a, b);
    return;
  }
  y[0] = p.add ? y[0] + a : a;
  if (both) y[1] = p.add ? y[1] + b : b;
}

void launch_gemm_mma(const Device& device, Stream& stream, const GemmParams& params);
void launch_gemm_wgmma(const Device& device, Stream& stream, const GemmParams& params);

}  // namespace lacuna::cuda
