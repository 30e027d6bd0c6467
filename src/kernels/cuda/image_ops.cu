// src/kernels/cuda/image_ops.cu - norms, heads and experts of image_ops.h; all memory bound.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/e4m3.h"
#include "core/error.h"
#include "kernels/cuda/image_ops.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kPieces = 4, kPieceValues = 8;  // of a thread in a norm; values of 16 bytes
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

/// A block has a row, kept in registers as float32.
__global__ void __launch_bounds__(1024) modulated_norm(const __grid_constant__ ModulatedNormArgs a) {
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
#pragma unroll
    for (int j = 0; j < kPieceValues; ++j) {
      if (k + j >= a.width) continue;
      v[i][j] =
          widen(narrow((v[i][j] - mean) * inverse_deviation * (1 + __ldcg(scale + k + j)) + __ldcg(shift + k + j)));
      most = fmaxf(most, fabsf(v[i][j]));
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

__global__ void __launch_bounds__(kThreads) gated_add(const __grid_constant__ GatedAddArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x, image = image_of(a.rows, a.first + m);
  const float* const gate = a.gate + image * a.gate_stride;
  bf16* const x = a.x + m * a.x_stride;
  const bf16* const y = a.y + m * a.y_stride;
  for (int64_t k = int64_t(threadIdx.x) * 2; k < a.width; k += 2 * int(blockDim.x)) {
    if (k + 1 == a.width) {
      store_one(x + k, widen(load_one(x + k)) + __ldcg(gate + k) * widen(load_one(y + k)));
      continue;
    }
    const uint32_t before = load_pair(x + k), add = load_pair(y + k);
    const float low = widen(before) + __ldcg(gate + k) * widen(add);
    const float high = widen(before >> 16) + __ldcg(gate + k + 1) * widen(add >> 16);
    *reinterpret_cast<uint32_t*>(x + k) = narrow(low) | narrow(high) << 16;
  }
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

/// A block has an expert.
__global__ void __launch_bounds__(1024) count_rows(const __grid_constant__ RouteArgs a) {
  __shared__ float sums[32];
  launch_dependents();
  wait_for_predecessors();
  int count = 0;
  for (int64_t i = threadIdx.x; i < a.M * a.top_k; i += blockDim.x)
    count += __ldcg(a.expert + i) == int(blockIdx.x) ? 1 : 0;
  const float total = block_total(float(count), sums);  // exact below 2^24 rows of an expert
  if (threadIdx.x == 0) a.counts[blockIdx.x] = int(total);
}

/// A block has an expert, whose rows follow one another in the order of their tokens.
__global__ void __launch_bounds__(1024) place_rows(const __grid_constant__ RouteArgs a) {
  __shared__ int of_warp[32];
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, mine = int(blockIdx.x);
  int next = 0;
  for (int e = 0; e < mine; ++e) next += __ldcg(a.counts + e);
  if (threadIdx.x == 0) {
    a.offsets[mine] = next;
    if (mine == a.experts - 1) a.offsets[a.experts] = next + __ldcg(a.counts + mine);
  }
  const int64_t choices = a.M * a.top_k;
  for (int64_t begin = 0; begin < choices; begin += blockDim.x) {
    const int64_t i = begin + threadIdx.x;
    const bool here = i < choices && __ldcg(a.expert + i) == mine;
    const unsigned votes = __ballot_sync(~0u, here);
    __syncthreads();  // of_warp is not read any more
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < int(blockDim.x) / 32; ++w) {
      if (w < warp) before += of_warp[w];
      all += of_warp[w];
    }
    if (here) {
      const int row = next + before + __popc(votes & ((1u << lane) - 1));
      a.token[row] = int32_t(i / a.top_k);
      a.row[i] = row;
    }
    next += all;
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

__global__ void __launch_bounds__(kThreads) combine_experts(const __grid_constant__ CombineExpertsArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x, image = image_of(a.rows, a.first + m);
  const float* const gate = a.gate + image * a.gate_stride;
  bf16* const x = a.x + m * a.x_stride;
  for (int64_t k = threadIdx.x; k < a.width; k += blockDim.x) {
    float sum = 0;
    for (int choice = 0; choice < a.top_k; ++choice) {
      const int64_t row = __ldcg(a.row + m * a.top_k + choice);
      sum += __ldcg(a.weight + m * a.top_k + choice) * widen(load_one(a.results + row * a.result_stride + k));
    }
    store_one(x + k, widen(load_one(x + k)) + __ldcg(gate + k) * sum);
  }
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
  constexpr int64_t kMostWidth = int64_t{1024} * kPieces * kPieceValues;
  if (args.width < 1 || args.width > kMostWidth)
    throw Error("a norm of {} values on CUDA; it takes 1 to {}", args.width, kMostWidth);
  if (args.x_stride % 8 != 0 || args.y_stride % 8 != 0 || args.code_stride % 16 != 0)
    throw Error("rows of a norm must be aligned to 16 bytes");
  const int64_t pieces = (args.width + kPieceValues - 1) / kPieceValues, threads = (pieces + kPieces - 1) / kPieces;
  launch_kernel(device, stream, modulated_norm, {dim3(unsigned(args.M)), int((threads + 31) / 32 * 32)}, args);
}

void launch_gated_add(const Device& device, Stream& stream, const GatedAddArgs& args) {
  if (args.M <= 0) return;
  check_rows(args.rows, args.first, args.M);
  if (args.x_stride % 2 != 0 || args.y_stride % 2 != 0) throw Error("rows of a sum must be aligned to 4 bytes");
  launch_kernel(device, stream, gated_add, {dim3(unsigned(args.M)), kThreads}, args);
}

void launch_image_heads(const Device& device, Stream& stream, const ImageHeadsArgs& args) {
  if (args.M <= 0) return;
  check_rows(args.rows, args.first, args.M);
  if (args.head_dim % 2 != 0 || args.padded_dim % 2 != 0 || args.head_dim > args.padded_dim || args.padded_dim > 128)
    throw Error("--device cuda: heads of {} values; even ones up to 128 are run", args.head_dim);
  if (args.in_stride % 2 != 0 || args.out_stride % 2 != 0) throw Error("rows of heads must be aligned to 4 bytes");
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
  if (args.experts < 1 || args.experts > 1024 || args.top_k < 1 || args.top_k > 32 || args.top_k > args.experts)
    throw Error("--device cuda: {} of {} experts; up to 32 of up to 1024 are run", args.top_k, args.experts);
  if (args.M * args.top_k >= int64_t{1} << 31) throw Error("{} rows of experts are too many", args.M * args.top_k);
  const int threads = int(args.M * args.top_k >= 1024 ? 1024 : (args.M * args.top_k + 31) / 32 * 32);
  launch_kernel(device, stream, choose_experts, {dim3(blocks_of_warps(args.M)), kThreads}, args);
  launch_kernel(device, stream, count_rows, {dim3(unsigned(args.experts)), threads}, args);
  launch_kernel(device, stream, place_rows, {dim3(unsigned(args.experts)), threads}, args);
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
  launch_kernel(device, stream, combine_experts, {dim3(unsigned(args.M)), kThreads}, args);
}

}  // namespace lacuna::cuda
