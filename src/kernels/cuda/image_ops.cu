// src/kernels/cuda/image_ops.cu - norms, heads and experts of image_ops.h; all memory bound.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "core/e4m3.h"
#include "core/error.h"
#include "kernels/cuda/image_ops.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kPieceValues = 8;  // of 16 bytes
constexpr int kThreads = 256;

__device__ __forceinline__ int64_t image_of(const TokenRows& rows, int64_t row) {
  const int64_t text = rows.images * rows.text;
  return row < text ? row / rows.text : (row - text) / rows.image;
}
/// Of a token in its image, text first.
__device__ __forceinline__ int64_t position_of(const TokenRows& rows, int64_t row) {
  const int64_t text = rows.images * rows.text;
  return row < text ? row % rows.text : rows.text + (row - text) % rows.image;
}

__device__ __forceinline__ float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ uint32_t narrow(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
__device__ __forceinline__ uint32_t load_pair(const bf16* from) {
  return __ldcg(reinterpret_cast<const unsigned*>(from));
}
__device__ __forceinline__ uint32_t load_one(const bf16* from) {
  return __ldcg(reinterpret_cast<const unsigned short*>(from));
}
__device__ __forceinline__ void store_one(bf16* to, float v) {
  *reinterpret_cast<unsigned short*>(to) = (unsigned short)narrow(v);
}

__device__ __forceinline__ float warp_total(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

/// The sum of a block; every thread calls it, and gets it.
__device__ __forceinline__ float block_total(float v, float (&of_warp)[32]) {
  v = warp_total(v);
  __syncthreads();  // of_warp is not read any more
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_total(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0f);
}
__device__ __forceinline__ float block_largest(float v, uint32_t (&of_warp)[32]) {
  const uint32_t mine = __reduce_max_sync(~0u, __float_as_uint(v));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  return __uint_as_float(__reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0u));
}

/// Eight values from k on; zeros from `end` on.
__device__ __forceinline__ uint4 load_eight(const bf16* from, int64_t k, int64_t end) {
  if (k + kPieceValues <= end) return __ldcg(reinterpret_cast<const uint4*>(from + k));
  uint32_t words[4] = {};
  for (int i = 0; k + i < end && i < kPieceValues; ++i) words[i / 2] |= load_one(from + k + i) << (16 * (i % 2));
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void unpack(const uint4& piece, float (&v)[kPieceValues]) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) v[2 * i] = widen(words[i]), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
}

/// Eight terms of a modulation from k on.
template <bool kAligned>
__device__ __forceinline__ void load_terms(const float* from, int64_t k, int64_t end, float (&v)[kPieceValues]) {
  if constexpr (kAligned) {  // through L1: the rows of an image read the same
    const float4 low = *reinterpret_cast<const float4*>(from + k),
                 high = *reinterpret_cast<const float4*>(from + k + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
#pragma unroll
    for (int j = 0; j < kPieceValues; ++j) v[j] = k + j < end ? __ldcg(from + k + j) : 0.0f;
  }
}

/// A block has a row, kept in registers as float32. kPieces: of a thread. kAligned: shift, scale and the width
/// are of whole pieces.
template <int kPieces, bool kAligned>
__global__ void __launch_bounds__(kPieces > 2 ? 1024 : 512)
    modulated_norm(const __grid_constant__ ModulatedNormArgs a) {
  __shared__ float sums[32];
  __shared__ uint32_t largest[32];
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x, image = image_of(a.rows, a.first + m);
  const bf16* const x = a.x + m * a.x_stride;
  float v[kPieces][kPieceValues];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t k = (int64_t(i) * blockDim.x + threadIdx.x) * kPieceValues;
    unpack(k < a.width ? load_eight(x, k, a.width) : make_uint4(0, 0, 0, 0), v[i]);
#pragma unroll
    for (const float value : v[i]) sum += value;
  }
  const float mean = block_total(sum, sums) / float(a.width);
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t k = (int64_t(i) * blockDim.x + threadIdx.x) * kPieceValues;
#pragma unroll
    for (int j = 0; j < kPieceValues; ++j)
      if (k + j < a.width) squares += (v[i][j] - mean) * (v[i][j] - mean);
  }
  const float inverse_deviation = 1 / sqrtf(block_total(squares, sums) / float(a.width) + a.eps);
  const float* const shift = a.shift + image * a.modulation_stride;
  const float* const scale = a.scale + image * a.modulation_stride;
  float most = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t k = (int64_t(i) * blockDim.x + threadIdx.x) * kPieceValues;
    if (k >= a.width) continue;
    float scales[kPieceValues], shifts[kPieceValues];
    load_terms<kAligned>(scale, k, a.width, scales);
    load_terms<kAligned>(shift, k, a.width, shifts);
#pragma unroll
    for (int j = 0; j < kPieceValues; ++j) {
      v[i][j] = widen(narrow((v[i][j] - mean) * inverse_deviation * (1 + scales[j]) + shifts[j]));
      if (kAligned || k + j < a.width) most = fmaxf(most, fabsf(v[i][j]));
    }
    if (a.y == nullptr) continue;
    bf16* const y = a.y + m * a.y_stride + k;
    if (k + kPieceValues <= a.width) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = narrow(v[i][2 * j]) | narrow(v[i][2 * j + 1]) << 16;
      *reinterpret_cast<uint4*>(y) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      for (int j = 0; j < kPieceValues; ++j)
        if (k + j < a.width) store_one(y + j, v[i][j]);
    }
  }
  if (a.codes == nullptr) return;
  const float quotient = __fdiv_rn(block_largest(most, largest), kLargestE4m3);
  const float code_scale = quotient > kLeastE4m3Scale ? quotient : kLeastE4m3Scale, inverse = __frcp_rn(code_scale);
  if (threadIdx.x == 0) a.code_scale[m] = code_scale;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t k = (int64_t(i) * blockDim.x + threadIdx.x) * kPieceValues;
    uint32_t words[2] = {};
#pragma unroll
    for (int j = 0; j < kPieceValues; j += 2)
      words[j / 4] |=
          uint32_t(__nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(v[i][j], inverse), __fmul_rn(v[i][j + 1], inverse)),
                                            __NV_SATFINITE, __NV_E4M3))
          << (8 * (j % 4));
    std::byte* const codes = a.codes + m * a.code_stride + k;
    if (k + kPieceValues <= a.width) {
      *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
    } else {
      for (int j = 0; j < kPieceValues; ++j)
        if (k + j < a.width) codes[j] = std::byte(words[j / 4] >> (8 * (j % 4)) & 255);
    }
  }
}

/// x += gate * v of eight values from k on.
template <bool kAligned>
__device__ __forceinline__ void add_gated(bf16* x, const float* gate, const float (&v)[kPieceValues], int64_t k,
                                          int64_t end) {
  float before[kPieceValues], gates[kPieceValues];
  unpack(load_eight(x, k, end), before);
  load_terms<kAligned>(gate, k, end, gates);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = narrow(before[2 * i] + gates[2 * i] * v[2 * i]) |
               narrow(before[2 * i + 1] + gates[2 * i + 1] * v[2 * i + 1]) << 16;
  if (kAligned || k + kPieceValues <= end) {
    *reinterpret_cast<uint4*>(x + k) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i)
      if (k + i < end)
        reinterpret_cast<unsigned short*>(x + k)[i] = (unsigned short)(words[i / 2] >> (16 * (i % 2)) & 0xffff);
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) gated_add(const __grid_constant__ GatedAddArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x;
  const float* const gate = a.gate + image_of(a.rows, a.first + m) * a.gate_stride;
  for (int64_t k = int64_t(threadIdx.x) * kPieceValues; k < a.width; k += kPieceValues * int(blockDim.x)) {
    float v[kPieceValues];
    unpack(load_eight(a.y + m * a.y_stride, k, a.width), v);
    add_gated<kAligned>(a.x + m * a.x_stride, gate, v, k, a.width);
  }
}

/// A half-warp has a head of 128 values; a lane 8 of them.
__device__ __forceinline__ uint4 turn_eight(const uint4& piece, const float* norm, const float (&cos)[4],
                                            const float (&sin)[4], float eps) {
  float v[kPieceValues], weight[kPieceValues];
  unpack(piece, v);
  float squares = 0;
#pragma unroll
  for (const float value : v) squares += value * value;
#pragma unroll
  for (int step = 8; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = 1 / sqrtf(squares / 128 + eps);
  load_terms<true>(norm, 0, kPieceValues, weight);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = v[2 * i] * factor * weight[2 * i], y = v[2 * i + 1] * factor * weight[2 * i + 1];
    words[i] = narrow(x * cos[i] - y * sin[i]) | narrow(x * sin[i] + y * cos[i]) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Heads of 128 values, everything aligned to 16 bytes, values that stay where they are.
__global__ void __launch_bounds__(kThreads) image_heads_of_128(const __grid_constant__ ImageHeadsArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 16;
  // Half-warps past the end take the last head's part in the shuffles.
  const int64_t heads = a.M * a.n_heads, own = int64_t(blockIdx.x) * (kThreads / 16) + int(threadIdx.x) / 16;
  const int64_t at = min(own, heads - 1);
  const int64_t m = at / a.n_heads, head = at % a.n_heads, position = position_of(a.rows, a.first + m);
  const int64_t in = m * a.in_stride + head * 128 + 8 * lane, out = m * a.out_stride + head * 128 + 8 * lane;
  const uint4 q = __ldcg(reinterpret_cast<const uint4*>(a.q + in)),
              k = __ldcg(reinterpret_cast<const uint4*>(a.k + in));
  const float4 cos4 = *reinterpret_cast<const float4*>(a.cos + position * 64 + 4 * lane);
  const float4 sin4 = *reinterpret_cast<const float4*>(a.sin + position * 64 + 4 * lane);
  const float cos[4] = {cos4.x, cos4.y, cos4.z, cos4.w}, sin[4] = {sin4.x, sin4.y, sin4.z, sin4.w};
  const uint4 turned_q = turn_eight(q, a.q_norm + 8 * lane, cos, sin, a.eps);
  const uint4 turned_k = turn_eight(k, a.k_norm + 8 * lane, cos, sin, a.eps);
  if (own >= heads) return;
  *reinterpret_cast<uint4*>(a.q_out + out) = turned_q;
  *reinterpret_cast<uint4*>(a.k_out + out) = turned_k;
}

/// A warp has a head of a token; a lane pairs lane and lane + 32.
__device__ __forceinline__ void turn_head(const ImageHeadsArgs& a, const bf16* from, const float* norm,
                                          const float* cos, const float* sin, bf16* to, int lane) {
  const int pairs = int(a.head_dim / 2);
  float v[2][2] = {};
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= pairs) continue;
    const uint32_t bits = load_pair(from + 2 * pair);
    v[i][0] = widen(bits), v[i][1] = __uint_as_float(bits & 0xffff0000u);
    squares += v[i][0] * v[i][0] + v[i][1] * v[i][1];
  }
  const float factor = 1 / sqrtf(warp_total(squares) / float(a.head_dim) + a.eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = lane + 32 * i;
    if (2 * pair >= a.padded_dim) continue;
    uint32_t bits = 0;
    if (pair < pairs) {
      const float x = v[i][0] * factor * norm[2 * pair], y = v[i][1] * factor * norm[2 * pair + 1];
      const float c = cos[pair], s = sin[pair];
      bits = narrow(x * c - y * s) | narrow(x * s + y * c) << 16;
    }
    *reinterpret_cast<uint32_t*>(to + 2 * pair) = bits;
  }
}

__global__ void __launch_bounds__(kThreads) image_heads(const __grid_constant__ ImageHeadsArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32;
  const int64_t at = int64_t(blockIdx.x) * (kThreads / 32) + int(threadIdx.x) / 32;
  if (at >= a.M * a.n_heads) return;
  const int64_t m = at / a.n_heads, head = at % a.n_heads, position = position_of(a.rows, a.first + m);
  const int64_t in = m * a.in_stride + head * a.head_dim, out = m * a.out_stride + head * a.padded_dim;
  const float* const cos = a.cos + position * (a.head_dim / 2);
  const float* const sin = a.sin + position * (a.head_dim / 2);
  turn_head(a, a.q + in, a.q_norm, cos, sin, a.q_out + out, lane);
  turn_head(a, a.k + in, a.k_norm, cos, sin, a.k_out + out, lane);
  if (a.v == nullptr) return;
  for (int64_t i = 2 * lane; i < a.padded_dim; i += 64)
    *reinterpret_cast<uint32_t*>(a.v_out + out + i) = i < a.head_dim ? load_pair(a.v + in + i) : 0u;
}

__global__ void __launch_bounds__(kThreads)
    silu_sum(const float* first, const float* second, const float* third, int64_t count, bf16* y) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  float v = __ldcg(first + i);
  if (second != nullptr) v += __ldcg(second + i);
  if (third != nullptr) v += __ldcg(third + i);
  store_one(y + i, silu(v));
}

/// A warp has a token: it takes the largest logit that is left, top_k times.
__global__ void __launch_bounds__(kThreads) choose_experts(const __grid_constant__ RouteArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32;
  const int64_t m = int64_t(blockIdx.x) * (kThreads / 32) + int(threadIdx.x) / 32;
  if (m >= a.M) return;
  const float* const logits = a.logits + m * a.logit_stride;
  uint32_t taken = 0;  // bit i: expert lane + 32 i
  float top = 0, of_chosen = 0, mine = 0;
  for (int choice = 0; choice < a.top_k; ++choice) {
    float best = -INFINITY;
    int expert = a.experts;
    for (int e = lane; e < a.experts; e += 32) {
      if (taken >> (e / 32) & 1) continue;
      const float logit = __ldcg(logits + e);
      if (expert == a.experts || logit > best) best = logit, expert = e;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int of = __shfl_xor_sync(~0u, expert, step);
      if (of < a.experts && (expert == a.experts || other > best || (other == best && of < expert)))
        best = other, expert = of;
    }
    if (expert % 32 == lane) taken |= 1u << (expert / 32);
    if (choice == 0) top = best;
    const float share = expf(best - top);
    of_chosen += share;
    if (lane == choice) mine = share;
    if (lane == 0) a.expert[m * a.top_k + choice] = expert;
  }
  float all = 0;
  for (int e = lane; e < a.experts; e += 32) all += expf(__ldcg(logits + e) - top);
  all = warp_total(all);
  if (lane < a.top_k) a.weight[m * a.top_k + lane] = mine / (a.normalize ? of_chosen : all);
}

/// Block b, a warp, has choices [b length, (b + 1) length); an expert's rows before them are counts[expert][b].
__global__ void __launch_bounds__(32) count_rows(const __grid_constant__ RouteArgs a, int64_t length) {
  __shared__ int count[kMostExperts];
  launch_dependents();
  for (int e = int(threadIdx.x); e < a.experts; e += 32) count[e] = 0;
  __syncwarp();
  wait_for_predecessors();
  const int64_t begin = blockIdx.x * length, end = min(begin + length, a.M * a.top_k);
  for (int64_t i = begin + threadIdx.x; i < end; i += 32) atomicAdd(count + __ldcg(a.expert + i), 1);
  __syncwarp();
  for (int e = int(threadIdx.x); e < a.experts; e += 32) a.counts[int64_t(e) * gridDim.x + blockIdx.x] = count[e];
}

__device__ __forceinline__ int warp_sum_up_to(int v) {  // of lanes up to the one that calls
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

/// One block. A warp has an expert: its counts become those of the parts before; then the first makes the offsets.
__global__ void __launch_bounds__(1024) place_experts(const __grid_constant__ RouteArgs a, int parts) {
  __shared__ int rows[kMostExperts];
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (int e = warp; e < a.experts; e += 32) {
    int32_t* const counts = a.counts + int64_t(e) * parts;
    int before = 0;
    for (int begin = 0; begin < parts; begin += 32) {
      const int mine = begin + lane < parts ? __ldcg(counts + begin + lane) : 0, up_to = warp_sum_up_to(mine);
      if (begin + lane < parts) counts[begin + lane] = before + up_to - mine;
      before += __shfl_sync(~0u, up_to, 31);
    }
    if (lane == 0) rows[e] = before;
  }
  __syncthreads();
  if (warp > 0) return;
  int before = 0;
  for (int begin = 0; begin < a.experts; begin += 32) {
    const int mine = begin + lane < a.experts ? rows[begin + lane] : 0, up_to = warp_sum_up_to(mine);
    if (begin + lane < a.experts) a.offsets[begin + lane] = before + up_to - mine;
    before += __shfl_sync(~0u, up_to, 31);
  }
  if (lane == 0) a.offsets[a.experts] = before;
}

/// An expert's rows follow one another in the order of their tokens.
__global__ void __launch_bounds__(32) place_rows(const __grid_constant__ RouteArgs a, int64_t length) {
  __shared__ int next[kMostExperts];
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x);
  for (int e = lane; e < a.experts; e += 32)
    next[e] = __ldcg(a.offsets + e) + __ldcg(a.counts + int64_t(e) * gridDim.x + blockIdx.x);
  const int64_t begin = blockIdx.x * length, end = min(begin + length, a.M * a.top_k);
  for (int64_t at = begin; at < end; at += 32) {
    const int64_t i = at + lane;
    const int expert = i < end ? __ldcg(a.expert + i) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    __syncwarp();  // next is as the lanes before left it
    const int row = expert < 0 ? 0 : next[expert] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (expert < 0) continue;
    if (same >> lane == 1) next[expert] = row + 1;  // the last of them
    a.token[row] = int32_t(i / a.top_k);
    a.row[i] = row;
  }
}

/// A warp has a row.
__global__ void __launch_bounds__(kThreads) gather_rows(const __grid_constant__ GatherRowsArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + int(threadIdx.x) / 32;
  if (row >= a.count) return;
  const int64_t token = __ldcg(a.token + row);
  const auto* const from = reinterpret_cast<const uint4*>(a.from + token * a.from_stride);
  auto* const to = reinterpret_cast<uint4*>(a.to + row * a.to_stride);
  for (int64_t i = lane; i < a.bytes / 16; i += 32) to[i] = __ldcg(from + i);
  if (a.from_scale != nullptr && lane == 0) a.to_scale[row] = __ldcg(a.from_scale + token);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) combine_experts(const __grid_constant__ CombineExpertsArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x;
  const float* const gate = a.gate + image_of(a.rows, a.first + m) * a.gate_stride;
  for (int64_t k = int64_t(threadIdx.x) * kPieceValues; k < a.width; k += kPieceValues * int(blockDim.x)) {
    float sum[kPieceValues] = {};
#pragma unroll 4
    for (int choice = 0; choice < a.top_k; ++choice) {
      const int64_t row = __ldcg(a.row + m * a.top_k + choice);
      const float weight = __ldcg(a.weight + m * a.top_k + choice);
      float v[kPieceValues];
      unpack(load_eight(a.results + row * a.result_stride, k, a.width), v);
#pragma unroll
      for (int i = 0; i < kPieceValues; ++i) sum[i] += weight * v[i];
    }
    add_gated<kAligned>(a.x + m * a.x_stride, gate, sum, k, a.width);
  }
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

/// Whether a row's terms, each of an image, are of whole pieces.
bool gates_are_whole(int64_t width, const float* gate, int64_t stride) {
  return width % kPieceValues == 0 && stride % 4 == 0 && is_aligned(gate);
}

int threads_of_row(int64_t width) {
  const int64_t pieces = (width + kPieceValues - 1) / kPieceValues;
  return int(std::min<int64_t>((pieces + 31) / 32 * 32, kThreads));
}

unsigned blocks_of_warps(int64_t warps) { return unsigned((warps + kThreads / 32 - 1) / (kThreads / 32)); }

void check_rows(const TokenRows& rows, int64_t first, int64_t M) {
  if (first < 0 || M < 0 || first + M > rows.count())
    throw Error("rows {} to {} of {} images' tokens, which are {}", first, first + M, rows.images, rows.count());
}

}  // namespace

void launch_modulated_norm(const Device& device, Stream& stream, const ModulatedNormArgs& args) {
  if (args.M <= 0) return;
  check_rows(args.rows, args.first, args.M);
  constexpr int64_t kMostWidth = int64_t{1024} * 4 * kPieceValues;
  if (args.width < 1 || args.width > kMostWidth)
    throw Error("a norm of {} values on CUDA; it takes 1 to {}", args.width, kMostWidth);
  if (args.x_stride % 8 != 0 || args.y_stride % 8 != 0 || args.code_stride % 16 != 0)
    throw Error("rows of a norm must be aligned to 16 bytes");
  const int64_t pieces = (args.width + kPieceValues - 1) / kPieceValues;
  const auto launch = [&](auto kernel, int64_t pieces_of_thread) {
    const int64_t threads = (pieces + pieces_of_thread - 1) / pieces_of_thread;
    launch_kernel(device, stream, kernel, {dim3(unsigned(args.M)), int((threads + 31) / 32 * 32)}, args);
  };
  const bool aligned = gates_are_whole(args.width, args.shift, args.modulation_stride) && is_aligned(args.scale);
  if (pieces > 512 * 2) return launch(modulated_norm<4, false>, 4);
  launch(aligned ? modulated_norm<2, true> : modulated_norm<2, false>, 2);
}

void launch_gated_add(const Device& device, Stream& stream, const GatedAddArgs& args) {
  if (args.M <= 0) return;
  check_rows(args.rows, args.first, args.M);
  if (args.x_stride % 8 != 0 || args.y_stride % 8 != 0 || !is_aligned(args.x) || !is_aligned(args.y))
    throw Error("rows of a sum must be aligned to 16 bytes");
  launch_kernel(device, stream,
                gates_are_whole(args.width, args.gate, args.gate_stride) ? gated_add<true> : gated_add<false>,
                {dim3(unsigned(args.M)), threads_of_row(args.width)}, args);
}

void launch_image_heads(const Device& device, Stream& stream, const ImageHeadsArgs& args) {
  if (args.M <= 0) return;
  check_rows(args.rows, args.first, args.M);
  if (args.head_dim % 2 != 0 || args.padded_dim % 2 != 0 || args.head_dim > args.padded_dim || args.padded_dim > 128)
    throw Error("--device cuda: heads of {} values; even ones up to 128 are run", args.head_dim);
  if (args.in_stride % 2 != 0 || args.out_stride % 2 != 0) throw Error("rows of heads must be aligned to 4 bytes");
  const bool of_128 = args.head_dim == 128 && args.v == nullptr && args.in_stride % 8 == 0 &&
                      args.out_stride % 8 == 0 && is_aligned(args.q) && is_aligned(args.k) && is_aligned(args.q_out) &&
                      is_aligned(args.k_out) && is_aligned(args.q_norm) && is_aligned(args.k_norm) &&
                      is_aligned(args.cos) && is_aligned(args.sin);
  if (of_128) {
    const auto blocks = unsigned((args.M * args.n_heads + kThreads / 16 - 1) / (kThreads / 16));
    return launch_kernel(device, stream, image_heads_of_128, {dim3(blocks), kThreads}, args);
  }
  launch_kernel(device, stream, image_heads, {dim3(blocks_of_warps(args.M * args.n_heads)), kThreads}, args);
}

void launch_silu_sum(const Device& device, Stream& stream, const float* first, const float* second, const float* third,
                     int64_t count, bf16* y) {
  if (count <= 0) return;
  launch_kernel(device, stream, silu_sum, {dim3(unsigned((count + kThreads - 1) / kThreads)), kThreads}, first, second,
                third, count, y);
}

void launch_route(const Device& device, Stream& stream, const RouteArgs& args) {
  if (args.M <= 0) return;
  if (args.experts < 1 || args.experts > kMostExperts || args.top_k < 1 || args.top_k > 32 || args.top_k > args.experts)
    throw Error("--device cuda: {} of {} experts; up to 32 of up to {} are run", args.top_k, args.experts,
                kMostExperts);
  const int64_t choices = args.M * args.top_k;
  if (choices >= int64_t{1} << 31) throw Error("{} rows of experts are too many", choices);
  const int64_t length = route_part(choices), parts = route_parts(choices);
  launch_kernel(device, stream, choose_experts, {dim3(blocks_of_warps(args.M)), kThreads}, args);
  launch_kernel(device, stream, count_rows, {dim3(unsigned(parts)), 32}, args, length);
  launch_kernel(device, stream, place_experts, {dim3(1), 1024}, args, int(parts));
  launch_kernel(device, stream, place_rows, {dim3(unsigned(parts)), 32}, args, length);
}

void launch_gather_rows(const Device& device, Stream& stream, const GatherRowsArgs& args) {
  if (args.count <= 0) return;
  if (args.bytes % 16 != 0 || args.from_stride % 16 != 0 || args.to_stride % 16 != 0)
    throw Error("rows to gather must be aligned to 16 bytes");
  launch_kernel(device, stream, gather_rows, {dim3(blocks_of_warps(args.count)), kThreads}, args);
}

void launch_combine_experts(const Device& device, Stream& stream, const CombineExpertsArgs& args) {
  if (args.M <= 0) return;
  check_rows(args.rows, args.first, args.M);
  if (args.x_stride % 8 != 0 || args.result_stride % 8 != 0 || !is_aligned(args.x) || !is_aligned(args.results))
    throw Error("rows of experts' results must be aligned to 16 bytes");
  launch_kernel(
      device, stream,
      gates_are_whole(args.width, args.gate, args.gate_stride) ? combine_experts<true> : combine_experts<false>,
      {dim3(unsigned(args.M)), threads_of_row(args.width)}, args);
}

}  // namespace lacuna::cuda
