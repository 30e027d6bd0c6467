// src/kernels/cuda/tensor_core_few.cu - dense weights in the tensor cores' blocks by up to four tokens: bound by
// reading the weights, so that plain float32 arithmetic suffices.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core_few.h"
#include "kernels/cuda/tensor_core_store.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = int(kTileRowsOfWeights);
constexpr int kPiecesOfRow = int(kTileInputBytes) / 16, kRowsAtOnce = 32 / kPiecesOfRow;
constexpr int kPiecesOfLane = kRows / kRowsAtOnce;  // of a block of 64 rows

/// The values of 16 bytes.
template <bool kEightBits>
struct Values;
template <>
struct Values<false> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(const uint4& piece, float (&v)[kCount]) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
};
template <>
struct Values<true> {
  static constexpr int kCount = 16;
  static __device__ __forceinline__ void unpack(const uint4& piece, float (&v)[kCount]) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const __half2_raw pair =
          __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(words[i / 2] >> (16 * (i % 2)) & 0xffff), __NV_E4M3);
      v[2 * i] = __half2float(__ushort_as_half(pair.x)), v[2 * i + 1] = __half2float(__ushort_as_half(pair.y));
    }
  }
};

/// 16 bytes of a token from byte k on; zeros from byte `end` on.
__device__ __forceinline__ uint4 load_token(const std::byte* x, int64_t k, int64_t end) {
  if (k + 16 <= end) return __ldcg(reinterpret_cast<const uint4*>(x + k));
  uint32_t words[4] = {};
  for (int i = 0; k + i < end && i < 16; ++i)
    words[i / 4] |= uint32_t{__ldcg(reinterpret_cast<const unsigned char*>(x) + k + i)} << (8 * (i % 4));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// A block of threads has 64 outputs, a warp every eighth block of weights of them. Lane 8 r + p reads place p of rows
/// r, r + 4, ...: piece p ^ (row % 8), one for even steps of four rows and one for odd.
template <bool kEightBits, int kTokens>
__global__ void __launch_bounds__(kThreads) few_tokens(const __grid_constant__ TensorCoreArgs a) {
  using V = Values<kEightBits>;
  __shared__ float sums[kWarps][kTokens][kRows];
  launch_dependents();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int first_row = lane / kPiecesOfRow, place = lane % kPiecesOfRow;
  const int64_t row_bytes = a.w.K * (kEightBits ? 1 : 2);
  const int64_t blocks = (row_bytes + kTileInputBytes - 1) / kTileInputBytes;
  const auto* const w =
      reinterpret_cast<const uint4*>(a.w.blocks) + blockIdx.x * blocks * (kRows * kPiecesOfRow) + lane;
  wait_for_predecessors();
  float acc[kPiecesOfLane][kTokens] = {};
  for (int64_t b = warp; b < blocks; b += kWarps) {
    uint4 piece[kPiecesOfLane];
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) piece[i] = __ldcg(w + b * (kRows * kPiecesOfRow) + 32 * i);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int64_t k = b * kTileInputBytes + 16 * (place ^ (first_row + kRowsAtOnce * odd));
      float x[kTokens][V::kCount];
#pragma unroll
      for (int t = 0; t < kTokens; ++t)
        V::unpack(t < a.M ? load_token(a.x + t * a.x_stride, k, row_bytes) : make_uint4(0, 0, 0, 0), x[t]);
#pragma unroll
      for (int i = odd; i < kPiecesOfLane; i += 2) {
        float values[V::kCount];
        V::unpack(piece[i], values);
#pragma unroll
        for (int t = 0; t < kTokens; ++t)
#pragma unroll
          for (int j = 0; j < V::kCount; ++j) acc[i][t] = fmaf(values[j], x[t][j], acc[i][t]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPiecesOfLane; ++i)
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float v = acc[i][t];
#pragma unroll
      for (int step = kPiecesOfRow / 2; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
      if (place == 0) sums[warp][t][kRowsAtOnce * i + first_row] = v;
    }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kTokens * kRows; i += kThreads) {
    const int t = i / kRows, row = i % kRows;
    const int64_t n = int64_t{blockIdx.x} * kRows + row;
    if (t >= a.M || n >= a.w.N) continue;
    float sum = 0;
#pragma unroll
    for (int of = 0; of < kWarps; ++of) sum += sums[of][t][row];
    const OutputTerms terms(a, n, n);
    store_result(a, t * a.y_stride + n, terms.finish(sum, a.x_scale != nullptr ? __ldcg(a.x_scale + t) : 1.0f));
  }
}

template <bool kEightBits>
void launch(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  const LaunchShape shape{dim3(unsigned((args.w.N + kRows - 1) / kRows)), kThreads};
  if (args.M == 1) return launch_kernel(device, stream, few_tokens<kEightBits, 1>, shape, args);
  if (args.M == 2) return launch_kernel(device, stream, few_tokens<kEightBits, 2>, shape, args);
  static_assert(kMostFewTokens == 4);
  launch_kernel(device, stream, few_tokens<kEightBits, 4>, shape, args);
}

}  // namespace

void launch_tensor_core_few(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  if (args.w.operation.eight_bits) return launch<true>(device, stream, args);
  launch<false>(device, stream, args);
}

}  // namespace lacuna::cuda
