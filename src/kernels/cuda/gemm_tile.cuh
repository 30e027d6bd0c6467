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

/// Sums of outputs n + 8 j and the one after, n even, of token m become results. sum(j): that pair.
template <int kPairs, class Sum>
__device__ __forceinline__ void store_row(const GemmParams& p, int m, int n, const Sum& sum) {
  const float x_scale = __ldcg(p.x_scale + m);
  float* const y = p.y + m * p.stride + n;
  const auto result = [&](float s, int output) {
    const float v = s * x_scale * __ldg(p.w_scale + output);
    return p.bias != nullptr ? v + __ldg(p.bias + output) : v;
  };
  if (!p.pairs || n + 8 * (kPairs - 1) + 2 > p.N) {
    for (int j = 0; j < kPairs; ++j)
      for (int e = 0; e < 2; ++e) {
        if (n + 8 * j + e >= p.N) return;
        const float v = result(e == 0 ? sum(j).x : sum(j).y, n + 8 * j + e);
        y[8 * j + e] = p.add ? y[8 * j + e] + v : v;
      }
    return;
  }
  constexpr int kAtOnce = kPairs < 8 ? kPairs : 8;  // all loads before the first store
#pragma unroll
  for (int first = 0; first < kPairs; first += kAtOnce) {
    float2 before[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      before[j] = p.add ? *reinterpret_cast<const float2*>(y + 8 * (first + j)) : make_float2(0, 0);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = 8 * (first + j);
      const float2 s = sum(first + j);
      *reinterpret_cast<float2*>(y + at) =
          make_float2(before[j].x + result(s.x, n + at), before[j].y + result(s.y, n + at + 1));
    }
  }
}

void launch_gemm_mma(const Device& device, Stream& stream, const GemmParams& params);
void launch_gemm_wgmma(const Device& device, Stream& stream, const GemmParams& params);

}  // namespace lacuna::cuda
