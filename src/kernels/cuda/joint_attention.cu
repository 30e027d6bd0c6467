// src/kernels/cuda/joint_attention.cu - attention of all tokens of an image on tensor cores, one pass over the keys
// with a running maximum (FlashAttention-2, arXiv:2307.08691, Alg. 1), and the choice between this kernel and wgmma's.
//
// A block has 128 queries of a head, a warp 32 of them, so that a tile's keys and values are read from shared memory
// once for two products; tiles of 32 keys come while the one before is multiplied.
#include <cuda_bf16.h>

#include <cstdint>

#include "core/error.h"
#include "kernels/cuda/image_ops.h"
#include "kernels/cuda/joint_attention_wgmma.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kQueries = 128, kKeys = 32, kStages = 2;

/// A tile [rows, kD]: pieces of 8 swizzled by row.
template <int kD>
__device__ __forceinline__ constexpr int place(int row, int piece) {
  return (row * (kD / 8) + (piece ^ (row % 8))) * 16;
}
template <int kD>
constexpr int64_t kSharedBytes = int64_t{kQueries + kStages * 2 * kKeys} * kD * 2;

__device__ __forceinline__ int64_t row_of(const TokenRows& rows, int64_t image, int64_t token) {
  return token < rows.text ? image * rows.text + token
                           : rows.images * rows.text + image * rows.image + token - rows.text;
}

/// Tokens [t0, t0 + kRows) of an image; zeros past its last and beyond head_dim.
template <int kD, int kRows>
__device__ __forceinline__ void load_tile(const JointAttentionArgs& a, std::byte* to, const bf16* from, int64_t stride,
                                          int64_t image, int64_t t0) {
  constexpr int kPieces = kD / 8;
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + int(threadIdx.x), row = at / kPieces, piece = at % kPieces;
    const bool here = t0 + row < a.rows.text + a.rows.image && piece * 8 < a.head_dim;
    copy_async(to + place<kD>(row, piece), here ? from + row_of(a.rows, image, t0 + row) * stride + piece * 8 : from,
               here);
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
__device__ __forceinline__ uint32_t pack(float low, float high) {
  return uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

template <int kD>
__global__ void __launch_bounds__(kThreads) attend_jointly(const __grid_constant__ JointAttentionArgs a) {
  constexpr int kTile = kKeys * kD * 2, kHalves = 2;
  std::byte* const queries = dynamic_shared<std::byte>();
  std::byte* const tiles = queries + kQueries * kD * 2;  // [kStages] of keys, then values
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int64_t tokens = a.rows.text + a.rows.image, t_query = int64_t(blockIdx.x) * kQueries;
  const int64_t head = int64_t(blockIdx.y) % a.n_heads, image = int64_t(blockIdx.y) / a.n_heads;
  launch_dependents();
  wait_for_predecessors();
  const bf16* const keys = a.k + head * a.head_dim;
  const bf16* const values = a.v + head * a.head_dim;
  const auto load = [&](int stage, int64_t t0) {
    load_tile<kD, kKeys>(a, tiles + stage * 2 * kTile, keys, a.stride, image, t0);
    load_tile<kD, kKeys>(a, tiles + stage * 2 * kTile + kTile, values, a.v_stride, image, t0);
  };
  load_tile<kD, kQueries>(a, queries, a.q + head * a.head_dim, a.stride, image, t_query);
  load(0, 0);
  commit_copies();

  const float factor = a.scale * 1.44269504088896f;  // exponentials are powers of two
  float sums[kHalves][kD / 8][4] = {}, top[kHalves][2], total[kHalves][2] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) top[h][0] = top[h][1] = -INFINITY;
  for (int64_t t0 = 0, round = 0; t0 < tokens; t0 += kKeys, ++round) {
    const int stage = int(round % kStages);
    if (t0 + kKeys < tokens) load(int((round + 1) % kStages), t0 + kKeys);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    const std::byte* const key_tile = tiles + stage * 2 * kTile;
    const std::byte* const value_tile = key_tile + kTile;

    float scores[kHalves][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      MmaA q[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        q[h] = load_a(queries + place<kD>(warp * 32 + h * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        MmaB k[2];
        load_b(key_tile + place<kD>(16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), k[0], k[1]);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          multiply_bf16(scores[h][2 * j], q[h], k[0]);
          multiply_bf16(scores[h][2 * j + 1], q[h], k[1]);
        }
      }
    }
    if (t0 + kKeys > tokens) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (t0 + 8 * j + lane % 4 * 2 + e % 2 >= tokens)
            for (int h = 0; h < kHalves; ++h) scores[h][j][e] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float highest[2] = {top[h][0], top[h][1]};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) highest[e / 2] = fmaxf(highest[e / 2], scores[h][j][e]);
      float keep[2], shift[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        highest[i] = quad_max(highest[i]);
        shift[i] = highest[i] == -INFINITY ? 0.0f : highest[i] * factor;
        keep[i] = exp2f(top[h][i] * factor - shift[i]);
        top[h][i] = highest[i];
        total[h][i] *= keep[i];
      }
#pragma unroll
      for (int d = 0; d < kD / 8; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[h][d][e] *= keep[e / 2];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& s = scores[h][j][e];
          s = exp2f(s * factor - shift[e / 2]);
          total[h][e / 2] += s;
        }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      MmaA weights[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // row half part % 2, columns 8 (part / 2) on
          const float* const s = scores[h][2 * j + part / 2] + 2 * (part % 2);
          weights[h].r[part] = pack(s[0], s[1]);
        }
#pragma unroll
      for (int d = 0; d < kD / 16; ++d) {
        MmaB v[2];
        load_b_rows(value_tile + place<kD>(16 * j + lane % 16, 2 * d + lane / 16), v[0], v[1]);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          multiply_bf16(sums[h][2 * d], weights[h], v[0]);
          multiply_bf16(sums[h][2 * d + 1], weights[h], v[1]);
        }
      }
    }
    __syncthreads();  // the tile may be overwritten
  }

#pragma unroll
  for (int h = 0; h < kHalves; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = t_query + warp * 32 + h * 16 + i * 8 + lane / 4;
      const float inverse = 1 / quad_sum(total[h][i]);
      if (token >= tokens) continue;
      bf16* const out = a.out + row_of(a.rows, image, token) * a.out_stride + head * a.out_dim;
#pragma unroll
      for (int d = 0; d < kD / 8; ++d)
        if (8 * d + lane % 4 * 2 < a.out_dim)
          *reinterpret_cast<uint32_t*>(out + 8 * d + lane % 4 * 2) =
              pack(sums[h][d][2 * i] * inverse, sums[h][d][2 * i + 1] * inverse);
    }
}

template <int kD>
void launch(const Device& device, Stream& stream, const JointAttentionArgs& args) {
  const auto kernel = attend_jointly<kD>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes<kD>)));
  const dim3 blocks(unsigned((args.rows.tokens() + kQueries - 1) / kQueries),
                    unsigned(args.n_heads * args.rows.images));
  launch_kernel(device, stream, kernel, {blocks, kThreads, kSharedBytes<kD>}, args);
}

/// As JointAttentionKernel says, but for the device.
bool fits_wgmma(const JointAttentionArgs& a) {
  return a.head_dim > 64 && a.out_dim % 8 == 0 && a.out_stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(a.out) % 16 == 0 && a.rows.tokens() <= kMostWgmmaTokens;
}

}  // namespace

JointAttentionKernel joint_attention_kernel(const DeviceInfo& device, const JointAttentionArgs& args) {
#if LACUNA_HAVE_SM90A
  const bool has_wgmma = device.major == 9;
#else
  const bool has_wgmma = false;
#endif
  if (args.kernel == JointAttentionKernel::mma) return JointAttentionKernel::mma;
  if (has_wgmma && fits_wgmma(args)) return JointAttentionKernel::wgmma;
  if (args.kernel == JointAttentionKernel::best) return JointAttentionKernel::mma;
  if (!has_wgmma)
    throw Error("{} (compute capability {}.{}) does not run attention by wgmma, which this build may not have",
                device.name, device.major, device.minor);
  throw Error(
      "attention by wgmma takes heads of 72 to 128 values, outputs of multiples of 8 values aligned to 16 bytes and at "
      "most {} tokens; these are {} values, {} of them written, {} apart, and {} tokens",
      kMostWgmmaTokens, args.head_dim, args.out_dim, args.out_stride, args.rows.tokens());
}

void launch_joint_attention(const Device& device, Stream& stream, const JointAttentionArgs& args) {
  if (args.rows.count() <= 0) return;
  if (args.head_dim % 8 != 0 || args.head_dim < 8 || args.head_dim > 128 || args.out_dim % 2 != 0 ||
      args.out_dim > args.head_dim)
    throw Error("--device cuda: attention of heads of {} values; multiples of 8 up to 128 are run", args.head_dim);
  if (args.stride % 8 != 0 || args.v_stride % 8 != 0 || args.out_stride % 2 != 0)
    throw Error("rows of queries, keys and values must be aligned to 16 bytes");
  if (args.n_heads * args.rows.images > 65535)
    throw Error("{} heads of {} images at once; at most 65535", args.n_heads, args.rows.images);
  [[maybe_unused]] const JointAttentionKernel kernel = joint_attention_kernel(device.info(), args);
#if LACUNA_HAVE_SM90A
  if (kernel == JointAttentionKernel::wgmma) return launch_joint_attention_wgmma(device, stream, args);
#endif
  if (args.head_dim <= 64)
    launch<64>(device, stream, args);
  else
    launch<128>(device, stream, args);
}

}  // namespace lacuna::cuda
