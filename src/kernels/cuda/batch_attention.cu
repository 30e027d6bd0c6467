// src/kernels/cuda/batch_attention.cu - attention of many tokens on tensor cores, one pass over the keys with a running
// maximum (FlashAttention, arXiv:2205.14135, Alg. 1).
//
// A row is a token and one of the query heads that share a key head: row r of a key head is token r / group, head
// r % group. A block has 64 rows, a warp 16 of them; tiles of keys and values come through shared memory.
#include <cuda_fp16.h>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/ops_block.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kRows = kWarps * 16;

/// A tile [rows, kD] of halves: pieces of 8 swizzled by row.
template <int kD>
__device__ __forceinline__ constexpr int place(int row, int piece) {
  return (row * (kD / 8) + (piece ^ (row % 8))) * 16;
}

template <int kD, int kKeys, int kStages>
struct Shared {
  static constexpr int kQuery = kRows * kD * 2, kTile = kKeys * kD * 2;  // bytes; queries: of each half
  static constexpr int kBytes = 2 * kQuery + kStages * 2 * kTile;
};

/// Keys or values [t0, t0 + kKeys) of the cache; zeros from `end` on and beyond head_dim.
template <int kD, int kKeys>
__device__ __forceinline__ void load_tile(std::byte* to, const __half* from, int64_t t0, int64_t end, int head_dim) {
  constexpr int kPieces = kD / 8;
#pragma unroll
  for (int i = 0; i < kKeys * kPieces / kThreads; ++i) {
    const int at = i * kThreads + int(threadIdx.x), row = at / kPieces, piece = at % kPieces;
    const bool here = t0 + row < end && piece * 8 < head_dim;
    copy_async(to + place<kD>(row, piece), here ? from + (t0 + row) * head_dim + piece * 8 : from, here);
  }
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

template <int kD, int kKeys, int kStages>
__global__ void __launch_bounds__(kThreads) attend_batch(const __grid_constant__ BatchAttentionArgs a) {
  using Space = Shared<kD, kKeys, kStages>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ float factors[kRows];  // what scores of a row are multiplied with
  std::byte* const high = shared;
  std::byte* const low = high + Space::kQuery;
  std::byte* const tiles = low + Space::kQuery;  // [kStages] of keys, then values
  const Heads& h = a.heads;
  const int D = int(h.head_dim), group = int(h.n_heads / h.n_kv_heads), lane = int(threadIdx.x) % 32;
  const int warp = int(threadIdx.x) / 32;
  const int64_t rows = h.M * group, row0 = int64_t(gridDim.x - 1 - blockIdx.x) * kRows;  // the longest ones first
  const int64_t kv_head = blockIdx.y;
  launch_dependents();
  wait_for_predecessors();
  const int64_t position = __ldcg(h.position);
  const int64_t first_at = position + row0 / group, last_at = position + min(row0 + kRows - 1, rows - 1) / group;
  const int64_t begin = a.window > 0 ? max(int64_t{0}, first_at - a.window + 1) / kKeys * kKeys : 0;
  const int64_t end = last_at + 1;
  const int64_t place_kv = kv_head * h.cache.capacity * D;
  const __half* const keys = reinterpret_cast<const __half*>(h.cache.keys) + place_kv;
  const __half* const values = reinterpret_cast<const __half*>(h.cache.values) + place_kv;
  const auto load = [&](int stage, int64_t t0) {
    std::byte* const to = tiles + stage * 2 * Space::kTile;
    load_tile<kD, kKeys>(to, keys, t0, end, D);
    load_tile<kD, kKeys>(to + Space::kTile, values, t0, end, D);
  };
  if constexpr (kStages > 1) load(0, begin);
  commit_copies();

  // Queries: a power of two brings a row's largest element to [2^10, 2^11), then two f16 hold 22 bits of it.
  constexpr int kAtOnce = 4;
  for (int r0 = warp * (kRows / kWarps); r0 < (warp + 1) * (kRows / kWarps); r0 += kAtOnce) {
    float v[kAtOnce][kD / 32];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t row = row0 + r0 + i, token = row / group;
      const float* const q = h.q + token * h.q_stride + (kv_head * group + (row - token * group)) * D;
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) v[i][j] = row < rows && j * 32 + lane < D ? __ldcg(q + j * 32 + lane) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (const float value : v[i]) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
      const int exponent = int(__reduce_max_sync(~0u, largest) >> 23);
      const int clamped = exponent == 255 ? 137 : min(max(exponent, 27), 240);
      const float up = __uint_as_float(uint32_t(264 - clamped) << 23);
      const float down = __uint_as_float(uint32_t(clamped - 10) << 23);
      if (lane == 0) factors[r0 + i] = down * a.scale * 1.44269504088896f;  // exponentials are powers of two
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) {
        const int d = j * 32 + lane, at = place<kD>(r0 + i, d / 8) + d % 8 * 2;
        const __half top = __float2half_rn(v[i][j] * up);
        *reinterpret_cast<__half*>(high + at) = top;
        *reinterpret_cast<__half*>(low + at) = __float2half_rn(v[i][j] * up - __half2float(top));
      }
    }
  }
  __syncthreads();

  const int own[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  const float factor[2] = {factors[own[0]], factors[own[1]]};
  int64_t from[2], to[2];  // positions that a row sees
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i] = position + min(row0 + own[i], rows - 1) / group;
    from[i] = a.window > 0 ? to[i] - a.window + 1 : 0;
  }
  const int64_t all_see_from = a.window > 0 ? last_at - a.window + 1 : 0;

  float sums[kD / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int64_t t0 = begin, round = 0; t0 < end; t0 += kKeys, ++round) {
    const int stage = int(round % kStages);
    if constexpr (kStages > 1) {
      if (t0 + kKeys < end) load(int((round + 1) % kStages), t0 + kKeys);
      commit_copies();
      wait_for_copies<1>();
    } else {
      load(0, t0);
      commit_copies();
      wait_for_copies<0>();
    }
    __syncthreads();
    const std::byte* const key_tile = tiles + stage * 2 * Space::kTile;
    const std::byte* const value_tile = key_tile + Space::kTile;

    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const int at = place<kD>(warp * 16 + lane % 16, 2 * step + lane / 16);
      const MmaA q_high = load_a(high + at), q_low = load_a(low + at);
      MmaB k[kKeys / 8];
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j)
        load_b(key_tile + place<kD>(16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), k[2 * j],
               k[2 * j + 1]);
#pragma unroll  // a sum's two products lie apart, so that none waits for the other
      for (int j = 0; j < kKeys / 8; ++j) multiply(scores[j], q_low, k[j]);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) multiply(scores[j], q_high, k[j]);
    }
    const bool all_seen = t0 + kKeys - 1 <= first_at && t0 >= all_see_from;
    float highest[2] = {top[0], top[1]};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = scores[j][e];
        s *= factor[e / 2];
        const int64_t t = t0 + 8 * j + lane % 4 * 2 + e % 2;
        if (!all_seen && (t > to[e / 2] || t < from[e / 2])) s = -INFINITY;
        highest[e / 2] = fmaxf(highest[e / 2], s);
      }
    float keep[2], shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      highest[i] = quad_max(highest[i]);
      shift[i] = highest[i] == -INFINITY ? 0.0f : highest[i];
      keep[i] = exp2f(top[i] - shift[i]);
      top[i] = highest[i];
      total[i] *= keep[i];
    }
#pragma unroll
    for (int d = 0; d < kD / 8; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[d][e] *= keep[e / 2];

#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      MmaA weights;
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // row half part % 2, columns 8 (part / 2) on
        const float* const s = scores[2 * j + part / 2] + 2 * (part % 2);
        const __half2 pair = __floats2half2_rn(exp2f(s[0] - shift[part % 2]), exp2f(s[1] - shift[part % 2]));
        weights.r[part] = as_bits(pair);
        const float2 rounded = __half22float2(pair);
        total[part % 2] += rounded.x + rounded.y;
      }
#pragma unroll
      for (int d = 0; d < kD / 16; ++d) {
        MmaB v[2];
        load_b_rows(value_tile + place<kD>(16 * j + lane % 16, 2 * d + lane / 16), v[0], v[1]);
        multiply(sums[2 * d], weights, v[0]);
        multiply(sums[2 * d + 1], weights, v[1]);
      }
    }
    __syncthreads();  // the tile may be overwritten
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = row0 + own[i];
    const float inverse = 1 / quad_sum(total[i]);
    if (row >= rows) continue;
    float* const out = a.out + row / group * a.out_stride + (kv_head * group + row % group) * D;
#pragma unroll
    for (int d = 0; d < kD / 8; ++d)
      if (8 * d < D)
        *reinterpret_cast<float2*>(out + 8 * d + lane % 4 * 2) =
            make_float2(sums[d][2 * i] * inverse, sums[d][2 * i + 1] * inverse);
  }
}

template <int kD, int kKeys, int kStages>
void launch(const Device& device, Stream& stream, const BatchAttentionArgs& args) {
  constexpr int64_t kBytes = Shared<kD, kKeys, kStages>::kBytes;
  const auto kernel = attend_batch<kD, kKeys, kStages>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  const Heads& h = args.heads;
  const int64_t rows = h.M * (h.n_heads / h.n_kv_heads);
  const dim3 blocks(unsigned((rows + kRows - 1) / kRows), unsigned(h.n_kv_heads));
  launch_kernel(device, stream, kernel, {blocks, kThreads, kBytes}, args);
}

}  // namespace

void launch_batch_attention(const Device& device, Stream& stream, const BatchAttentionArgs& args) {
  const Heads& h = args.heads;
  if (h.M <= 0) return;
  if (h.head_dim % 8 != 0 || h.head_dim < 8 || h.head_dim > 256)
    throw Error("--device cuda: head_dim = {}; the attention kernels take multiples of 8 up to 256", h.head_dim);
  if (h.n_kv_heads < 1 || h.n_heads % h.n_kv_heads != 0)
    throw Error("--device cuda: {} query heads are no multiple of {} key heads", h.n_heads, h.n_kv_heads);
  if (h.head_dim <= 64)
    launch<64, 64, 2>(device, stream, args);
  else if (h.head_dim <= 128)
    launch<128, 64, 2>(device, stream, args);
  else
    launch<256, 32, 1>(device, stream, args);
}

}  // namespace lacuna::cuda
