// src/kernels/cuda/sm90a/joint_attention_wgmma.cu - joint attention with wgmma, after FlashAttention-3
// (arXiv:2407.08608, Alg. 2): two warps have the copy engine bring tiles, two warpgroups of 64 queries each multiply.
//
// A warpgroup's scores of the next keys are computed beside the values of the present ones, and its exponentials while
// the tensor cores work on the other one's products. Blocks take tiles of queries one after the other, so that the next
// tile's keys come while the last one is written. Blocks of a cluster have different queries of the same head: each
// brings one half of the columns of keys and values to both.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/error.h"
#include "kernels/cuda/joint_attention_wgmma.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/cuda/sm90a/wgmma_tokens.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kGroups = 2, kThreads = (kGroups + 1) * 128, kCluster = 2;
constexpr int kDim = 128, kHalf = 64;  // columns of a head; of a box: rows of 128 bytes
constexpr int kGroupQueries = 64, kQueries = kGroups * kGroupQueries;
constexpr int kQueryHalfBytes = kGroupQueries * kHalf * 2, kQueryBytes = 2 * kQueryHalfBytes;  // of a warpgroup
constexpr int kKeys = 176, kHalfBytes = kKeys * kHalf * 2, kTileBytes = 2 * kHalfBytes;
constexpr int kStages = 2, kBarrierBytes = 512;
constexpr int kShared = kGroups * kQueryBytes + 2 * kStages * kTileBytes + kBarrierBytes;
static_assert(kShared <= 232448);  // what a block may have
constexpr int kLoadRegisters = 40, kMultiplyRegisters = 232;
constexpr int kTurnBarrier = 1;  // named barriers, one a warpgroup: its turn to use the tensor cores

/// Queries, keys and values of the text tokens, then of the image tokens: [images][n_heads][tokens][head_dim].
struct Maps {
  CUtensorMap q[2], k[2], v[2];
};

struct Params {
  Maps maps;
  int tokens[2];  // of an image: text, image
  int images, n_heads, out_dim;
  float factor;  // of scores: exponentials are powers of two
  bf16* out;
  int64_t out_stride;
};

/// Barriers of a ring of stages.
template <int kCount>
struct Ring {
  uint64_t full[kCount], empty[kCount];
};
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// 128 queries of a head of an image; tokens past the segment's end, perhaps all, are not there.
struct Tile {
  int segment, first, head, image;
};
/// The tiles of a block. Those of a head run side by side, so that its keys and values come from L2.
class Tiles {
 public:
  __device__ explicit Tiles(const Params& p) : p_(p) {
    text_ = (p.tokens[0] + kQueries - 1) / kQueries;
    a_head_ = (text_ + (p.tokens[1] + kQueries - 1) / kQueries + kCluster - 1) / kCluster;
    at_ = int(blockIdx.x) / kCluster, end_ = a_head_ * p.n_heads * p.images;
  }
  __device__ __forceinline__ bool next(Tile& tile) {
    if (at_ >= end_) return false;
    const int t = at_ % a_head_ * kCluster + int(blockIdx.x) % kCluster, head = at_ / a_head_;
    tile.segment = t >= text_ && p_.tokens[1] > 0;
    tile.first = (tile.segment > 0 ? t - text_ : t) * kQueries;
    tile.head = head % p_.n_heads, tile.image = head / p_.n_heads;
    at_ += int(gridDim.x) / kCluster;
    return true;
  }

 private:
  const Params& p_;
  int text_, a_head_, at_, end_;
};

/// Blocks of keys; none has keys of both segments.
class KeyBlocks {
 public:
  __device__ explicit KeyBlocks(const Params& p) : p_(p) {
    text_ = (p.tokens[0] + kKeys - 1) / kKeys;
    count_ = text_ + (p.tokens[1] + kKeys - 1) / kKeys;
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int segment(int block) const { return block >= text_; }
  __device__ __forceinline__ int first(int block) const { return (block >= text_ ? block - text_ : block) * kKeys; }
  /// Keys from the block's first to the segment's end: kKeys or more where all are there.
  __device__ __forceinline__ int valid(int block) const { return p_.tokens[segment(block)] - first(block); }

 private:
  const Params& p_;
  int text_, count_;
};

// ---- copies ----

__device__ __forceinline__ void load_tile(std::byte* to, const CUtensorMap* map, const Tile& tile, int first,
                                          uint64_t* full) {
  arrive_expecting(full, kTileBytes);
  const int half = int(blockIdx.x) % kCluster;
  copy_box(to + half * kHalfBytes, map, half * kHalf, first, tile.head, tile.image, full, 3);
}

/// Brings the blocks of keys, or of values, of all tiles; after_first(tile): once its first block is on its way.
template <class First>
__device__ __forceinline__ void load_blocks(const Params& p, const CUtensorMap (&maps)[2], std::byte* stages,
                                            Ring<kStages>& ring, First&& after_first) {
  Tiles tiles(p);
  const KeyBlocks blocks(p);
  Place at;
  Tile tile;
  while (tiles.next(tile)) {
#pragma unroll 1
    for (int b = 0; b < blocks.count(); ++b) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      load_tile(stages + at.stage * kTileBytes, &maps[blocks.segment(b)], tile, blocks.first(b), ring.full + at.stage);
      at.advance();
      if (b == 0) after_first(tile);
    }
  }
}

// ---- arithmetic of a warpgroup ----

/// What is asked of these registers before is done before, what is asked after is done after.
template <class T, int kCount>
__device__ __forceinline__ void pin(T (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if constexpr (sizeof(T) > 4)
      pin(v[i]);
    else if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(v[i])::"memory");
    else
      asm volatile("" : "+r"(v[i])::"memory");
}

/// Until here `total`, which is never negative, is computed.
__device__ __forceinline__ void hold(float total) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\nvote.sync.any.pred p, p, 0xffffffff;\n@p trap;\n}" ::"f"(total)
      : "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

/// Scores whose column is none of the first `valid` become -inf.
template <int kSums>
__device__ __forceinline__ void mask(float (&scores)[kSums], int valid) {
  const int left = valid - int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    if (i / 4 * 8 + i % 2 >= left) scores[i] = -INFINITY;
}

/// Of a thread's two rows: the largest score so far and the sum of this thread's weights.
struct Running {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};

  /// Scores become weights; keep: what the weights before must be multiplied by.
  template <int kSums>
  __device__ __forceinline__ void weigh(float (&scores)[kSums], float factor, float (&keep)[2]) {
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most[2] = {top[h], top[h]};
#pragma unroll
      for (int i = 2 * h; i < kSums; i += 4) most[i / 4 % 2] = fmaxf(most[i / 4 % 2], fmaxf(scores[i], scores[i + 1]));
      const float highest = quad_max(fmaxf(most[0], most[1]));
      shift[h] = highest == -INFINITY ? 0.0f : highest * factor;
      keep[h] = power_of_two(fmaf(top[h], factor, -shift[h]));
      top[h] = highest;
    }
    float sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      scores[i] = power_of_two(fmaf(scores[i], factor, -shift[i / 2 % 2]));
      sums[i / 2 % 2][i % 2] += scores[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = fmaf(total[h], keep[h], sums[h][0] + sums[h][1]);
  }
};

/// scores = Q K^T of a block of keys.
__device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 2], const std::byte* queries,
                                              const std::byte* keys) {
  const uint64_t a = describe_matrix(queries), b = describe_matrix(keys);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step)
    Step<false, false, kKeys>::template run<0>(scores, a + step / 4 * (kQueryHalfBytes / 16) + step % 4 * 2,
                                               b + step / 4 * (kHalfBytes / 16) + step % 4 * 2, 0, step > 0);
}

/// sums (+)= weights times a block of values.
__device__ __forceinline__ void multiply_values(float (&sums)[kDim / 2], const uint32_t (&weights)[kKeys / 16][4],
                                                const std::byte* values, int add) {
  const uint64_t b = describe_turned_matrix(values, kHalfBytes);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) multiply_held(sums, weights[step], b + step * 128, step > 0 ? 1 : add);
}

template <int kSums>
__device__ __forceinline__ void pack_weights(uint32_t (&to)[kSums / 8][4], const float (&from)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums / 2; ++i) to[i / 4][i % 4] = pack(from[2 * i], from[2 * i + 1]);
}

/// v[m] of lane t of four becomes v[t] of lane m.
__device__ __forceinline__ void turn_quad(uint32_t (&v)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (threadIdx.x & unsigned(bit)) != 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if ((m & bit) != 0) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? v[m] : v[m | bit], bit);
      (upper ? v[m] : v[m | bit]) = got;
    }
  }
}

/// Rows of a warpgroup's queries, divided by their totals.
__device__ __forceinline__ void store_rows(const Params& p, const Tile& tile, int group, const float (&sums)[kDim / 2],
                                           const Running& running) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = 1 / quad_sum(running.total[h]);
    const int token = tile.first + group * kGroupQueries + 16 * warp + 8 * h + lane / 4;
    const int64_t before = tile.segment > 0 ? int64_t(p.images) * p.tokens[0] : 0;
    bf16* const out = p.out + (before + int64_t(tile.image) * p.tokens[tile.segment] + token) * p.out_stride +
                      int64_t(tile.head) * p.out_dim;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      uint32_t v[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int at = 4 * (4 * i + m) + 2 * h;
        v[m] = pack(sums[at] * inverse, sums[at + 1] * inverse);
      }
      turn_quad(v);
      const int column = 8 * (4 * i + lane % 4);
      if (token < p.tokens[tile.segment] && column < p.out_dim)
        *reinterpret_cast<uint4*>(out + column) = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) attend_wgmma(const __grid_constant__ Params p) {
  using Stages = Ring<kStages>;
  using Queries = Ring<kGroups>;
  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* const keys = shared + kGroups * kQueryBytes;
  std::byte* const values = keys + kStages * kTileBytes;
  Stages& of_keys = *reinterpret_cast<Stages*>(values + kStages * kTileBytes);
  Stages& of_values = *(&of_keys + 1);
  Queries& of_queries = *reinterpret_cast<Queries*>(&of_values + 1);  // a stage is a warpgroup's
  static_assert(2 * sizeof(Stages) + sizeof(Queries) <= kBarrierBytes);
  const int group = int(threadIdx.x) / 128;
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(of_keys.full + s, 1), init_barrier(of_values.full + s, 1);
      init_barrier(of_keys.empty + s, kGroups * kCluster), init_barrier(of_values.empty + s, kGroups * kCluster);
    }
    for (int g = 0; g < kGroups; ++g) init_barrier(of_queries.full + g, 1), init_barrier(of_queries.empty + g, 1);
    fence_barriers();
  }
  synchronize_cluster();
  wait_for_predecessors();

  if (group == kGroups) {
    set_registers<kLoadRegisters, false>();
    const int thread = int(threadIdx.x) % 128;
    if (thread == 0) {
      uint32_t parity = 1;
      load_blocks(p, p.maps.k, keys, of_keys, [&](const Tile& tile) {
        for (int g = 0; g < kGroups; ++g) {
          std::byte* const to = shared + g * kQueryBytes;
          const int first = tile.first + g * kGroupQueries;
          wait_barrier(of_queries.empty + g, parity);
          arrive_expecting(of_queries.full + g, kQueryBytes);
          for (int half = 0; half < 2; ++half)
            copy_box(to + half * kQueryHalfBytes, &p.maps.q[tile.segment], half * kHalf, first, tile.head, tile.image,
                     of_queries.full + g, 0);
        }
        parity ^= 1;
      });
    } else if (thread == 32) {
      load_blocks(p, p.maps.v, values, of_values, [](const Tile&) {});
    }
  } else {
    set_registers<kMultiplyRegisters, true>();
    const std::byte* const queries = shared + group * kQueryBytes;
    const KeyBlocks blocks(p);
    const auto release = [&](uint64_t* barrier) {
      if (threadIdx.x % 128 < kCluster) arrive_at(barrier, threadIdx.x % 128);
    };
    Tiles tiles(p);
    Tile tile;
    Place key, value;
    uint32_t query_parity = 0;
    if (group == 1) arrive_named(kTurnBarrier, kGroups * 128);  // the first warpgroup begins
    while (tiles.next(tile)) {
      float sums[kDim / 2], scores[kKeys / 2], keep[2];
      uint32_t weights[kKeys / 16][4];
      Running running;
      const auto take_keys = [&](int block) {  // their products have ended
        pin(scores);
        release(of_keys.empty + key.stage);
        key.advance();
        if (block == blocks.count() - 1 && threadIdx.x % 128 == 0) arrive(of_queries.empty + group);
        if (blocks.valid(block) < kKeys) mask(scores, blocks.valid(block));
        running.weigh(scores, p.factor, keep);
        pin(scores);  // before the sums are waited for
      };
      const auto take_values = [&] {
        pin(sums);
        release(of_values.empty + value.stage);
        value.advance();
      };

      wait_barrier(of_queries.full + group, query_parity);
      query_parity ^= 1;
      wait_barrier(of_keys.full + key.stage, key.parity);
      begin_products();
      multiply_keys(scores, queries, keys + key.stage * kTileBytes);
      commit_products();
      wait_for_products<0>();
      take_keys(0);
      pack_weights(weights, scores);
      for (int block = 1; block < blocks.count(); ++block) {
        wait_barrier(of_keys.full + key.stage, key.parity);
        wait_barrier(of_values.full + value.stage, value.parity);
        sync_threads(kTurnBarrier + group, kGroups * 128);
        pin(weights);
        pin(sums);
        pin(scores);
        begin_products();
        multiply_keys(scores, queries, keys + key.stage * kTileBytes);
        commit_products();
        multiply_values(sums, weights, values + value.stage * kTileBytes, block > 1);
        commit_products();
        arrive_named(kTurnBarrier + 1 - group, kGroups * 128);
        wait_for_products<1>();
        take_keys(block);
        hold(running.total[0] + running.total[1]);
        wait_for_products<0>();
        take_values();
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) sums[i] *= keep[i / 2 % 2];
        pack_weights(weights, scores);
      }
      wait_barrier(of_values.full + value.stage, value.parity);
      pin(weights);
      pin(sums);
      begin_products();
      multiply_values(sums, weights, values + value.stage * kTileBytes, blocks.count() > 1);
      commit_products();
      wait_for_products<0>();
      take_values();
      store_rows(p, tile, group, sums, running);
    }
  }
  synchronize_cluster();  // none leaves while another writes to it
}

// ---- launches ----

/// Boxes of `box` tokens by 64 columns of a segment's heads; what is past its end, or the head's, comes as zeros.
CUtensorMap map_heads(const bf16* first, int64_t stride, int64_t tokens, int box, const JointAttentionArgs& a) {
  CUtensorMap map{};
  if (tokens == 0) return map;  // never asked for
  const cuuint64_t size[4] = {cuuint64_t(a.head_dim), cuuint64_t(tokens), cuuint64_t(a.n_heads),
                              cuuint64_t(a.rows.images)};
  const cuuint64_t strides[3] = {cuuint64_t(stride) * 2, cuuint64_t(a.head_dim) * 2, cuuint64_t(tokens * stride) * 2};
  const cuuint32_t shape[4] = {kHalf, cuuint32_t(box), 1, 1}, element[4] = {1, 1, 1, 1};
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<bf16*>(first), size, strides, shape,
                           element, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error("the driver refuses a tensor map of {} tokens of {} heads, {} values apart (error {})", tokens,
                a.n_heads, stride, int(result));
  return map;
}

}  // namespace

void launch_joint_attention_wgmma(const Device& device, Stream& stream, const JointAttentionArgs& a) {
  Params p{};
  const int64_t segment[2] = {a.rows.text, a.rows.image}, before = a.rows.images * a.rows.text;
  int64_t tiles = 0;
  for (int s = 0; s < 2; ++s) {
    const int64_t row = s > 0 ? before : 0;
    p.maps.q[s] = map_heads(a.q + row * a.stride, a.stride, segment[s], kGroupQueries, a);
    p.maps.k[s] = map_heads(a.k + row * a.stride, a.stride, segment[s], kKeys, a);
    p.maps.v[s] = map_heads(a.v + row * a.v_stride, a.v_stride, segment[s], kKeys, a);
    p.tokens[s] = int(segment[s]);
    tiles += (segment[s] + kQueries - 1) / kQueries;
  }
  p.images = int(a.rows.images), p.n_heads = int(a.n_heads), p.out_dim = int(a.out_dim);
  p.factor = a.scale * 1.44269504088896f;
  p.out = a.out, p.out_stride = a.out_stride;
  const int64_t items = (tiles + kCluster - 1) / kCluster * a.n_heads * a.rows.images;
  const int64_t clusters = std::min<int64_t>(items, device.info().multiprocessors / kCluster);
  check_cuda(cudaFuncSetAttribute(attend_wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_kernel(device, stream, attend_wgmma, {dim3(unsigned(clusters * kCluster)), kThreads, kShared, kCluster}, p);
}

}  // namespace lacuna::cuda
