// src/kernels/cuda/quantize_tokens.cu - tokens to E4M3 with a scale each (QuaSpa, section 3.2). Memory bound: reads
// M K values and writes as many bytes. A warp has a token of up to kWarpPieces pieces of 16 bytes, so that it waits for
// nobody; longer ones have a block.
#include <cuda_fp8.h>

#include <cstdint>

#include "core/e4m3.h"
#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {
namespace {

constexpr int kPieceBytes = 16, kWarpThreads = 256, kMostThreads = 1024;
// Pieces that a thread keeps in registers; in a block the rest of very long tokens is read again.
constexpr int kShortPieces = 4, kWarpPieces = 12, kBlockPieces = 8;

template <Element kType>
constexpr int kOfPiece = kPieceBytes / int(bytes_of(kType));  // values

template <Element kType>
__device__ __forceinline__ void unpack(const uint4& piece, float (&v)[kOfPiece<kType>]) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == Element::f32) {
      v[i] = __uint_as_float(words[i]);
    } else if constexpr (kType == Element::bf16) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      v[2 * i] = __low2float(as_half2(words[i]));
      v[2 * i + 1] = __high2float(as_half2(words[i]));
    }
  }
}

/// Values of which some may lie beyond K, where zeros are taken, or that are not aligned.
template <Element kType>
__device__ __forceinline__ uint4 load_values(const std::byte* row, int64_t piece, int64_t K) {
  const int64_t k = piece * kOfPiece<kType>;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kOfPiece<kType>; ++i) {
    if (k + i >= K) break;
    if constexpr (kType == Element::f32)
      words[i] = __ldcg(reinterpret_cast<const unsigned*>(row) + k + i);
    else
      words[i / 2] |= uint32_t(__ldcg(reinterpret_cast<const unsigned short*>(row) + k + i)) << (16 * (i % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ uint4 load_piece(const std::byte* row, int64_t piece) {
  return __ldcg(reinterpret_cast<const uint4*>(row) + piece);
}

/// Keeps the compiler from holding a piece's values instead, which are twice as large.
__device__ __forceinline__ void unpack_again(uint4& piece) {
  asm volatile("" : "+r"(piece.x), "+r"(piece.y), "+r"(piece.z), "+r"(piece.w));
}

/// The larger of `most` and the magnitudes; NaN counts as 0.
template <Element kType>
__device__ __forceinline__ float largest(float most, const uint4& piece) {
  float v[kOfPiece<kType>];
  unpack<kType>(piece, v);
#pragma unroll
  for (const float value : v) most = fmaxf(most, fabsf(value));
  return most;
}

template <Element kType>
__device__ __forceinline__ void store_codes(std::byte* row, int64_t piece, int64_t K, const uint4& values,
                                            float inverse) {
  constexpr int kCount = kOfPiece<kType>;
  float v[kCount];
  unpack<kType>(values, v);
  uint32_t words[kCount / 4];
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const auto two = [&](int at) {
      return uint32_t(__nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(v[at], inverse), __fmul_rn(v[at + 1], inverse)),
                                               __NV_SATFINITE, __NV_E4M3));
    };
    words[i] = two(4 * i) | two(4 * i + 2) << 16;
  }
  const int64_t k = piece * kCount;
  if (k + kCount <= K) {
    if constexpr (kCount == 8)
      *reinterpret_cast<uint2*>(row + k) = make_uint2(words[0], words[1]);
    else
      *reinterpret_cast<uint32_t*>(row + k) = words[0];
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (k + i < K) row[k + i] = std::byte(words[i / 4] >> (8 * (i % 4)) & 0xff);
}

/// The largest of a block's values, which are not negative.
__device__ __forceinline__ float block_max(float v) {
  __shared__ uint32_t of_warp[kMostThreads / 32];
  const uint32_t of_mine = __reduce_max_sync(~0u, __float_as_uint(v));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = of_mine;
  __syncthreads();
  const uint32_t other = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0;
  return __uint_as_float(__reduce_max_sync(~0u, other));
}

template <Element kType, int kPieces, bool kWholeBlock>
__global__ void __launch_bounds__(kWholeBlock ? kMostThreads : kWarpThreads)
    quantize_tokens(const __grid_constant__ QuantizeTokensArgs a, bool whole) {
  const int team = kWholeBlock ? int(blockDim.x) : 32, mine = int(threadIdx.x) % team;
  const int64_t m = int64_t(blockIdx.x) * (int(blockDim.x) / team) + int(threadIdx.x) / team;
  launch_dependents();
  if (m >= a.M) return;  // whole warps leave together
  wait_for_predecessors();
  const std::byte* const row = static_cast<const std::byte*>(a.x) + m * a.stride * (kPieceBytes / kOfPiece<kType>);
  const int64_t pieces = (a.K + kOfPiece<kType> - 1) / kOfPiece<kType>;
  uint4 kept[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) kept[i] = make_uint4(0, 0, 0, 0);
  if (whole) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (mine + i * team < pieces) kept[i] = load_piece(row, mine + i * team);
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (mine + i * team < pieces) kept[i] = load_values<kType>(row, mine + i * team, a.K);
  }
  float most = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) most = largest<kType>(most, kept[i]);
  if constexpr (kWholeBlock) {
    for (int64_t p = mine + int64_t{kPieces} * team; p < pieces; p += team)
      most = largest<kType>(most, load_values<kType>(row, p, a.K));
    most = block_max(most);
  } else {
    most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
  }

  const float quotient = __fdiv_rn(most, kLargestE4m3);
  const float scale = quotient > kLeastE4m3Scale ? quotient : kLeastE4m3Scale, inverse = __frcp_rn(scale);
  if (mine == 0) a.scale[m] = scale;
  std::byte* const codes = a.codes + m * a.code_stride;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) unpack_again(kept[i]);
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if (mine + i * team < pieces) store_codes<kType>(codes, mine + i * team, a.K, kept[i], inverse);
  if constexpr (kWholeBlock)
    for (int64_t p = mine + int64_t{kPieces} * team; p < pieces; p += team)
      store_codes<kType>(codes, p, a.K, load_values<kType>(row, p, a.K), inverse);
}

template <Element kType>
void launch(const Device& device, Stream& stream, const QuantizeTokensArgs& args) {
  const int64_t pieces = (args.K + kOfPiece<kType> - 1) / kOfPiece<kType>;
  const bool whole = reinterpret_cast<uintptr_t>(args.x) % kPieceBytes == 0 && args.stride % kOfPiece<kType> == 0 &&
                     args.K % kOfPiece<kType> == 0;
  const auto by_warps = [&](auto kernel) {
    constexpr int64_t kTokens = kWarpThreads / 32;
    launch_kernel(device, stream, kernel, {dim3(unsigned((args.M + kTokens - 1) / kTokens)), kWarpThreads}, args,
                  whole);
  };
  if (pieces <= 32 * kShortPieces) return by_warps(quantize_tokens<kType, kShortPieces, false>);
  if (pieces <= 32 * kWarpPieces) return by_warps(quantize_tokens<kType, kWarpPieces, false>);
  const int64_t threads = (pieces + 32 * kBlockPieces - 1) / (32 * kBlockPieces) * 32;
  launch_kernel(device, stream, quantize_tokens<kType, kBlockPieces, true>,
                {dim3(unsigned(args.M)), int(threads < kMostThreads ? threads : kMostThreads)}, args, whole);
}

void check_arguments(const QuantizeTokensArgs& a) {
  constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;  // blocks of a launch
  const auto element = uintptr_t(bytes_of(a.type));
  if (a.M > kMostTokens) throw Error("quantizing {} tokens at once; at most {}", a.M, kMostTokens);
  if (a.x == nullptr || a.codes == nullptr || a.scale == nullptr)
    throw Error("quantizing tokens needs memory for x, codes and scale");
  if (reinterpret_cast<uintptr_t>(a.x) % element != 0)
    throw Error("tokens of {}-byte values must be aligned to as many bytes", element);
  if (a.K < 0 || a.stride < a.K) throw Error("rows of tokens {} values apart hold less than K = {}", a.stride, a.K);
  if (reinterpret_cast<uintptr_t>(a.codes) % kPieceBytes != 0 || a.code_stride % kPieceBytes != 0)
    throw Error("codes of tokens need rows aligned to {} bytes; they are {} bytes apart", kPieceBytes, a.code_stride);
  if (a.code_stride < a.K) throw Error("rows of codes {} bytes apart hold less than K = {}", a.code_stride, a.K);
}

}  // namespace

void launch_quantize_tokens(const Device& device, Stream& stream, const QuantizeTokensArgs& args) {
  if (args.M <= 0) return;
  check_arguments(args);
  switch (args.type) {
    case Element::f32:
      return launch<Element::f32>(device, stream, args);
    case Element::f16:
      return launch<Element::f16>(device, stream, args);
    case Element::bf16:
      return launch<Element::bf16>(device, stream, args);
  }
}

}  // namespace lacuna::cuda
