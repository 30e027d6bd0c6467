// src/kernels/cuda/sm90a/tensor_core_wgmma.cuh - the products of tensor_core.h with wgmma (QuaSpa, section 3.3). A
// block computes tiles of outputs by tokens, one after the other: one warp has the copy engine bring weights and
// tokens, two warpgroups multiply, each a half of a tile's outputs. Blocks of a cluster have different outputs and the
// same tokens, of which each brings a share to all.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/sm90a/tensor_core_rows.h"
#include "kernels/cuda/sm90a/wgmma_tokens.cuh"
#include "kernels/cuda/tensor_core_store.cuh"
#include "kernels/cuda/tensor_core_wgmma.h"

namespace lacuna::cuda {
namespace {

constexpr int kGroups = 2, kThreads = (kGroups + 1) * 128, kMostShared = 232448;
constexpr int kBlockRows = kTileRowsOfWeights, kTokenBytes = kTileInputBytes;
constexpr int kStagedTokens = 64, kStagedBytes = kStagedTokens * kBlockRows * 2, kStaging = 2;
/// Pairs of tiles of outputs that are walked for one tile of tokens before the next one: together with the tokens of
/// the blocks that run at once they stay in L2.
constexpr int kRasterPairs = 12;

template <bool kEightBits_, bool kSparse_, bool kFull_, int kTokens_, int kCluster_>
struct Shape {
  static constexpr bool kEightBits = kEightBits_, kSparse = kSparse_, kFull = kFull_;
  static constexpr bool kDrain = kSparse || kFull;
  static constexpr int kTokens = kTokens_, kCluster = kCluster_;
  static constexpr int kSums = kTokens / 2;  // of a thread
  static constexpr int kValueBytes = kSparse ? 4096 : 8192, kSteps = kSparse ? 2 : 4;
  static constexpr int kBlockBytes = kValueBytes + (kSparse ? (kEightBits ? 1024 : 512) : 0);
  static constexpr int kStepTokenBytes = kSparse ? 64 : 32;
  static constexpr int kTokenTileBytes = kTokens * kTokenBytes;
  static constexpr int kStageBytes = (kTokenTileBytes + kGroups * kBlockBytes + 1023) / 1024 * 1024;
  static constexpr int kOther = kGroups * (kStaging * kStagedBytes + kTokens * 4) + 256;
  static constexpr int kStages = std::min(8, (kMostShared - kOther) / kStageBytes);
  static constexpr int kShared = kStages * kStageBytes + kOther;
  static_assert(kStages >= 3 && kSums * (kFull ? 2 : 1) <= 128);
};

/// What a block computes next.
struct Tile {
  int block = 0;  // of 64 outputs: the first of the tile, in its group
  int group = 0;
  int token = 0, end = 0;  // the first, and where the group's end
};

/// The tiles of a cluster, in order. All threads walk them alike.
template <class S>
class Tiles {
 public:
  __device__ __forceinline__ explicit Tiles(const TensorCoreArgs& a) : a_(a) {
    rows_ = a.groups > 0 ? int(a.w.N) / a.groups : int(a.w.N);
    group_blocks_ = (rows_ + kBlockRows - 1) / kBlockRows;
    pairs_ = (group_blocks_ + kGroups * S::kCluster - 1) / (kGroups * S::kCluster);
    step_ = int(gridDim.x) / S::kCluster;
    next_ = int(blockIdx.x) / S::kCluster;
  }
  __device__ __forceinline__ int rows() const { return rows_; }
  __device__ __forceinline__ int group_blocks() const { return group_blocks_; }

  __device__ __forceinline__ bool next(Tile& tile) {
    while (next_ - first_ >= tiles_) {
      if (++group_ >= max(a_.groups, 1)) return false;
      first_ += tiles_;
      begin_ = a_.groups > 0 ? a_.offsets[group_] : 0;
      end_ = a_.groups > 0 ? a_.offsets[group_ + 1] : int(a_.M);
      tiles_ = (end_ - begin_ + S::kTokens - 1) / S::kTokens * pairs_;
    }
    const int t = next_ - first_, token_tiles = tiles_ / pairs_;
    const int raster = t / (kRasterPairs * token_tiles), rest = t - raster * kRasterPairs * token_tiles;
    const int width = min(kRasterPairs, pairs_ - raster * kRasterPairs), column = rest / width;
    const int pair = raster * kRasterPairs + rest - column * width;
    const int rank = S::kCluster > 1 ? int(blockIdx.x) % S::kCluster : 0;
    tile.block = (pair * S::kCluster + rank) * kGroups;
    tile.group = group_;
    tile.token = begin_ + column * S::kTokens;
    tile.end = end_;
    next_ += step_;
    return true;
  }

 private:
  const TensorCoreArgs& a_;
  int rows_, group_blocks_, pairs_, step_, next_;
  int group_ = -1, begin_ = 0, end_ = 0, tiles_ = 0, first_ = 0;  // first_: tiles of the groups before
};

__device__ __forceinline__ uint32_t pack(Element type, float low, float high) {
  if (type == Element::bf16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  }
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ float2 unpack(Element type, uint32_t bits) {
  if (type == Element::bf16) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
  return __half22float2(reinterpret_cast<const __half2&>(bits));
}
/// The outputs of a warpgroup's block of 64 rows, from its staging buffers.
class Writer {
 public:
  __device__ __forceinline__ Writer(const TensorCoreArgs& a, std::byte* staging, int group)
      : a_(a), staging_(staging), barrier_(1 + group), thread_(int(threadIdx.x) % 128) {
    wide_ = a.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0 &&
            reinterpret_cast<uintptr_t>(a.add) % 16 == 0;
  }

  /// sums: of tokens [token, token + kTokens); rows of outputs from n on, of which `rows` there are.
  template <int kTokens, bool kActivate>
  __device__ __forceinline__ void staged(const float (&sums)[kTokens / 2], const float* x_scale, const OutputTerms& low,
                                         const OutputTerms& high, int token, int end, int n, int rows) {
    const int lane = thread_ % 32, warp = thread_ / 32;
    // Of store_turned: the lane's token of a pair of blocks of 8 tokens, and its piece of 8 outputs.
    const int place = (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
    for (int part = 0; part < kTokens / kStagedTokens; ++part) {
      std::byte* const buffer = staging_ + turn_ % kStaging * kStagedBytes;
      ++turn_;
      const int first = token + part * kStagedTokens;
      if (a_.add != nullptr) {
        fetch(buffer, first, end, n, rows);
        sync_threads(barrier_, 128);
      }
#pragma unroll
      for (int pair = 0; pair < kStagedTokens / 16; ++pair) {
        std::byte* const at = buffer + pair * 16 * 128 + place;
        float v[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = part * (kStagedTokens / 8) + 2 * pair + i;
          const float2 scale = *reinterpret_cast<const float2*>(x_scale + 8 * j + 2 * (lane % 4));
          v[i][0] = low.finish<kActivate>(sums[4 * j], scale.x);
          v[i][1] = low.finish<kActivate>(sums[4 * j + 1], scale.y);
          v[i][2] = high.finish<kActivate>(sums[4 * j + 2], scale.x);
          v[i][3] = high.finish<kActivate>(sums[4 * j + 3], scale.y);
        }
        if (a_.add != nullptr) {
          MmaB first_old, second_old;
          load_b_rows(at, first_old, second_old);
          add(v[0], first_old), add(v[1], second_old);
        }
        store_turned(at, pack(a_.type, v[0][0], v[0][1]), pack(a_.type, v[0][2], v[0][3]),
                     pack(a_.type, v[1][0], v[1][1]), pack(a_.type, v[1][2], v[1][3]));
      }
      sync_threads(barrier_, 128);
      store(buffer, first, end, n, rows);
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void direct(const float (&sums)[kTokens / 2], const float* x_scale, const OutputTerms& low,
                                         const OutputTerms& high, int token, int end, int n, int rows) const {
    const int lane = thread_ % 32, row = n + thread_ / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const int t = i / 4 * 8 + 2 * (lane % 4) + i % 2, out = row + i / 2 % 2 * 8;
      if (token + t >= end || out >= rows) continue;
      if (a_.write_back == WriteBack::separate) {
        a_.workspace[int64_t(out) * a_.M + token + t] = sums[i];
        continue;
      }
      const int64_t at = int64_t(token + t) * a_.y_stride + out;
      store_result(a_, at, (i / 2 % 2 == 0 ? low : high).finish(sums[i], x_scale[t]));
    }
  }

 private:
  /// f(place in the buffer, element of y, bytes) for kStagedTokens rows of 64 outputs as far as they count: 16 bytes at
  /// a time, or where these do not lie so, single values.
  template <class F>
  __device__ __forceinline__ void each(int token, int end, int n, int rows, const F& f) const {
    const int tokens = min(kStagedTokens, end - token);
    const int64_t base = int64_t(token) * a_.y_stride + n;
    if (wide_ && rows - n >= kBlockRows) {
      const int row = thread_ / 8, piece = thread_ % 8;
#pragma unroll
      for (int i = 0; i < kStagedTokens / 16; ++i)
        if (16 * i + row < tokens)
          f((16 * i + row) * 128 + (piece ^ (row % 8)) * 16, base + (16 * i + row) * a_.y_stride + 8 * piece, uint4{});
      return;
    }
    const int column = thread_ % kBlockRows;
    if (n + column >= rows) return;
#pragma unroll 1
    for (int row = thread_ / kBlockRows; row < tokens; row += 128 / kBlockRows)
      f(row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2, base + row * a_.y_stride + column, uint16_t{});
  }
  __device__ __forceinline__ void store(const std::byte* buffer, int token, int end, int n, int rows) const {
    each(token, end, n, rows, [&](int place, int64_t at, auto kind) {
      using T = decltype(kind);
      *reinterpret_cast<T*>(static_cast<uint16_t*>(a_.y) + at) = *reinterpret_cast<const T*>(buffer + place);
    });
  }
  __device__ __forceinline__ void fetch(std::byte* buffer, int token, int end, int n, int rows) const {
    each(token, end, n, rows, [&](int place, int64_t at, auto kind) {
      using T = decltype(kind);
      *reinterpret_cast<T*>(buffer + place) = *reinterpret_cast<const T*>(static_cast<const uint16_t*>(a_.add) + at);
    });
  }
  __device__ __forceinline__ void add(float (&v)[4], const MmaB& old) const {
    const float2 low = unpack(a_.type, old.r[0]), high = unpack(a_.type, old.r[1]);
    v[0] += low.x, v[1] += low.y, v[2] += high.x, v[3] += high.y;
  }

  const TensorCoreArgs& a_;
  std::byte* staging_;
  int barrier_, thread_, turn_ = 0;
  bool wide_;
};

/// The metadata of a stage, of a warpgroup's block.
template <class S>
struct Metadata {
  uint32_t words[2] = {};

  /// block: its values; at: the lane, counted over the warpgroup.
  __device__ __forceinline__ void load(const std::byte* block, int at) {
    const std::byte* const from = block + S::kValueBytes;
    if constexpr (S::kSparse && S::kEightBits) {
      const uint2 both = reinterpret_cast<const uint2*>(from)[at];
      words[0] = both.x, words[1] = both.y;
    } else if constexpr (S::kSparse) {
      words[0] = words[1] = reinterpret_cast<const uint32_t*>(from)[at];  // the selector tells its steps apart
    }
  }
  /// Until here the registers stay as they are.
  __device__ __forceinline__ void keep() const {
    if constexpr (S::kSparse) asm volatile("" ::"r"(words[0]), "r"(words[1]) : "memory");
  }
};

template <class S>
using Product = Step<S::kEightBits, S::kSparse, S::kTokens>;

template <class S, bool kStaged>
__global__ void __launch_bounds__(kThreads, 1)
    tensor_core_wgmma(const __grid_constant__ CUtensorMap map, const __grid_constant__ TensorCoreArgs a) {
  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* const staging = shared + S::kStages * S::kStageBytes;
  float* const token_scales = reinterpret_cast<float*>(staging + kGroups * kStaging * kStagedBytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(token_scales + kGroups * S::kTokens);
  uint64_t* const empty = full + S::kStages;
  const int group = int(threadIdx.x) / 128,
            k_tiles = int((a.w.K * (S::kEightBits ? 1 : 2) + kTokenBytes - 1) / kTokenBytes);
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      init_barrier(full + s, 1);
      init_barrier(empty + s, kGroups * S::kCluster);
    }
    fence_barriers();
  }
  if constexpr (S::kCluster > 1)
    synchronize_cluster();
  else
    __syncthreads();
  wait_for_predecessors();

  Tiles<S> tiles(a);
  Tile tile;
  if (group == kGroups) {
    set_registers<40, false>();
    if (threadIdx.x % 128 == 0) {
      constexpr int kShare = S::kTokens / S::kCluster;
      const int rank = S::kCluster > 1 ? int(blockIdx.x) % S::kCluster : 0;
      int turn = 0;
      while (tiles.next(tile)) {
        const std::byte* blocks[kGroups];
#pragma unroll
        for (int b = 0; b < kGroups; ++b) {
          const int block = tile.group * tiles.group_blocks() + min(tile.block + b, tiles.group_blocks() - 1);
          blocks[b] = a.w.blocks + int64_t(block) * k_tiles * S::kBlockBytes;
        }
        for (int k = 0; k < k_tiles; ++k, ++turn) {
          const int s = turn % S::kStages;
          std::byte* const stage = shared + s * S::kStageBytes;
          if (turn >= S::kStages) wait_barrier(empty + s, uint32_t(turn / S::kStages - 1) % 2);
          arrive_expecting(full + s, S::kTokenTileBytes + kGroups * S::kBlockBytes);
          copy_box(stage + rank * kShare * kTokenBytes, &map, k * kTokenBytes, tile.token + rank * kShare, full + s,
                   S::kCluster > 1 ? (1 << S::kCluster) - 1 : 0);
#pragma unroll
          for (int b = 0; b < kGroups; ++b)
            copy_bulk(stage + S::kTokenTileBytes + b * S::kBlockBytes, blocks[b] + int64_t(k) * S::kBlockBytes,
                      S::kBlockBytes, full + s);
        }
      }
    }
  } else {
    set_registers<232, true>();
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
    float* const x_scale = token_scales + group * S::kTokens;
    Writer writer(a, staging + group * kStaging * kStagedBytes, group);
    const auto release = [&](int s) {
      if (threadIdx.x % 128 >= S::kCluster) return;
      if constexpr (S::kCluster > 1)
        arrive_at(empty + s, threadIdx.x % 128);
      else
        arrive(empty + s);
    };
    int turn = 0;
    while (tiles.next(tile)) {
      float scales[(S::kTokens + 127) / 128];  // asked for before the products
#pragma unroll
      for (int t = 0; t < (S::kTokens + 127) / 128; ++t) {
        const int token = tile.token + int(threadIdx.x) % 128 + 128 * t;
        scales[t] = a.x_scale != nullptr && token < tile.end ? a.x_scale[token] : 1;
      }

      float sums[S::kSums];
      float whole[S::kFull ? S::kSums : 1] = {};
      for (int k = 0; k < k_tiles; ++k, ++turn) {
        const int s = turn % S::kStages;
        wait_barrier(full + s, uint32_t(turn / S::kStages) % 2);
        const std::byte* const stage = shared + s * S::kStageBytes;
        const std::byte* const values = stage + S::kTokenTileBytes + group * S::kBlockBytes;
        const uint64_t weights = S::kSparse ? describe_narrow_matrix(values) : describe_matrix(values);
        const uint64_t tokens = describe_matrix(stage);
        Metadata<S> metadata;
        metadata.load(values, 32 * warp + lane);
        begin_products();
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
          const uint64_t a_step = weights + 2 * step, b_step = tokens + step * (S::kStepTokenBytes / 16);
          const int add = step > 0 || (!S::kFull && k > 0);
          if (step % 2 == 0)
            Product<S>::template run<0>(sums, a_step, b_step, metadata.words[0], add);
          else
            Product<S>::template run<1>(sums, a_step, b_step, metadata.words[1], add);
        }
        commit_products();
        if constexpr (S::kDrain) {
          // The tensor core reads the metadata's registers until its products end, and nobody else protects them. The
          // other warpgroup's products fill the gap.
          wait_for_products<0>();
          metadata.keep();
          release(s);
          if constexpr (S::kFull) {
#pragma unroll
            for (int i = 0; i < S::kSums; ++i) whole[i] += sums[i];
          }
        } else {
          wait_for_products<1>();  // those of the stage before are done
          if (k > 0) release((turn - 1) % S::kStages);
        }
      }
      if constexpr (!S::kDrain) {
        wait_for_products<0>();
        release((turn - 1) % S::kStages);
      }

#pragma unroll
      for (int t = 0; t < (S::kTokens + 127) / 128; ++t)
        if (const int at = int(threadIdx.x) % 128 + 128 * t; at < S::kTokens) x_scale[at] = scales[t];
      sync_threads(1 + group, 128);
      const int rows = tiles.rows(), n = (tile.block + group) * kBlockRows;
      if (n < rows) {
        const int low = n + 16 * warp + lane / 4, high = low + 8, base = tile.group * rows;
        const OutputTerms low_terms(a, base + min(low, rows - 1), low), high_terms(a, base + min(high, rows - 1), high);
        const auto write = [&](const float(&totals)[S::kSums]) {
          if constexpr (!kStaged)
            writer.template direct<S::kTokens>(totals, x_scale, low_terms, high_terms, tile.token, tile.end, n, rows);
          else if (low_terms.activate)
            writer.template staged<S::kTokens, true>(totals, x_scale, low_terms, high_terms, tile.token, tile.end, n,
                                                     rows);
          else
            writer.template staged<S::kTokens, false>(totals, x_scale, low_terms, high_terms, tile.token, tile.end, n,
                                                      rows);
        };
        if constexpr (S::kFull)
          write(whole);
        else
          write(sums);
      }
      sync_threads(1 + group, 128);  // x_scale is read
    }
  }
  if constexpr (S::kCluster > 1) synchronize_cluster();  // none leaves while another writes to it
}

// ---- launches ----

CUtensorMap token_map(const TensorCoreArgs& a, bool eight_bits, int tokens) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess)
      throw Error("the NVIDIA driver has no cuTensorMapEncodeTiled; update it to one of CUDA 12 or later");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  CUtensorMap map;
  const cuuint64_t size[2] = {cuuint64_t(a.w.K) * (eight_bits ? 1 : 2), cuuint64_t(a.M)};
  const cuuint64_t stride[1] = {cuuint64_t(a.x_stride)};
  const cuuint32_t box[2] = {kTokenBytes, cuuint32_t(tokens)}, element[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<std::byte*>(a.x), size, stride, box,
                                 element, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error("the driver refuses a tensor map of {} tokens of {} bytes, {} bytes apart (error {})", a.M, size[0],
                a.x_stride, int(result));
  return map;
}

template <class S, bool kStaged>
void launch(const Device& device, Stream& stream, const TensorCoreArgs& a) {
  const auto kernel = tensor_core_wgmma<S, kStaged>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared));
  const int64_t rows = a.groups > 0 ? a.w.N / a.groups : a.w.N;
  const int64_t pairs = (rows + kBlockRows * kGroups * S::kCluster - 1) / (kBlockRows * kGroups * S::kCluster);
  const int64_t most = (a.M + S::kTokens - 1) / S::kTokens + a.groups;  // a group may begin a tile of tokens
  const int64_t clusters = std::min<int64_t>(pairs * most, device.info().multiprocessors / S::kCluster);
  launch_kernel(device, stream, kernel, {dim3(unsigned(clusters * S::kCluster)), kThreads, S::kShared, S::kCluster},
                token_map(a, S::kEightBits, S::kTokens / S::kCluster), a);
}

template <bool kEightBits, bool kSparse, bool kFull, int kTokens, int kCluster>
constexpr WgmmaRow row() {
  using S = Shape<kEightBits, kSparse, kFull, kTokens, kCluster>;
  return {{kGroups * kBlockRows, kTokens, kCluster}, launch<S, true>};
}

}  // namespace
}  // namespace lacuna::cuda
