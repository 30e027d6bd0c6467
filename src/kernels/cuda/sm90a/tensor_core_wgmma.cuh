// src/kernels/cuda/sm90a/tensor_core_wgmma.cuh - the products of tensor_core.h with wgmma (QuaSpa, section 3.3). A
// block computes tiles of outputs by tokens, one after the other: one warp has the copy engine bring weights and
// tokens, two warpgroups multiply, each a half of a tile's outputs. Blocks of a cluster have different outputs and the
// same tokens, of which each brings a share to all. The warp that brings things walks the tiles and announces them;
// staged results leave by the copy engine while the next tile's products run.
#pragma once

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/sm90a/tensor_core_rows.h"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/cuda/sm90a/wgmma_tokens.cuh"
#include "kernels/cuda/tensor_core_store.cuh"
#include "kernels/cuda/tensor_core_wgmma.h"

namespace lacuna::cuda {
namespace {

constexpr int kGroups = 2, kWarps = 4;  // warpgroups with sums; warps of one
constexpr int kThreads = (kGroups + 1) * 128, kMostShared = 232448;
constexpr int kBlockRows = kTileRowsOfWeights, kTokenBytes = kTileInputBytes;
constexpr int kStagedTokens = 64, kStagedBytes = kStagedTokens * kBlockRows * 2, kMostStages = 8;
/// Pairs of tiles of outputs that are walked for one tile of tokens before the next one: together with the tokens of
/// the blocks that run at once they stay in L2.
constexpr int kRasterPairs = 12;

/// A tile as the consumers read it, beside its first stage.
struct alignas(16) Announced {
  int n = 0;               // the first output, in its group
  int base = 0;            // the group's first row of w
  int token = 0, end = 0;  // as of a Tile
  int tokens = 0;          // 0: no tile follows
};

constexpr int kBarriers = 3;  // of a stage

template <bool kEightBits_, bool kSparse_, bool kFull_, int kTokens_, int kCluster_, bool kStaged_ = true>
struct Shape {
  static constexpr bool kEightBits = kEightBits_, kSparse = kSparse_, kFull = kFull_, kStaged = kStaged_;
  static constexpr bool kDrain = kSparse || kFull;
  static constexpr int kTokens = kTokens_, kCluster = kCluster_;
  static constexpr bool kSplits = kStaged && splits_last_round({kGroups * kBlockRows, kTokens, kCluster}, kFull);
  static constexpr int kLeastTokens = kTokens / (kSplits ? kMostSplit : 1);  // of a tile
  static constexpr int kSums = kTokens / 2;                                  // of a thread
  static constexpr int kValueBytes = kSparse ? 4096 : 8192, kSteps = kSparse ? 2 : 4;
  static constexpr int kBlockBytes = kValueBytes + (kSparse ? (kEightBits ? 1024 : 512) : 0);
  static constexpr int kStepTokenBytes = kSparse ? 64 : 32;
  static constexpr int kTokenTileBytes = kTokens * kTokenBytes;
  static constexpr int kStaging =
      std::min(kTokens / kStagedTokens, kSparse ? 3 : 2);  // buffers; dense, a third would cost a stage
  static constexpr int kStageBytes = (kTokenTileBytes + kGroups * kBlockBytes + 1023) / 1024 * 1024;
  static constexpr int kOther = kGroups * (kStaging * kStagedBytes + kTokens * int(sizeof(float))) +
                                kMostStages * int(kBarriers * sizeof(uint64_t) + sizeof(Announced));
  static constexpr int kStages = std::min(kMostStages, (kMostShared - kOther) / kStageBytes);
  static constexpr int kShared = kStages * kStageBytes + kOther;
  static_assert(kStages >= 3 && kSums * (kFull ? 2 : 1) <= 128);
  static_assert(kBarriers * kMostStages * sizeof(uint64_t) % alignof(Announced) == 0);
};

/// What a block computes next.
struct Tile {
  int block = 0;  // of 64 outputs: the first of the tile, in its group
  int group = 0;
  int token = 0, end = 0;  // the first, and where the group's end
  int tokens = 0;
};

/// The stages in turn. The phase's parity is what consumers wait for; the producer waits for the other one.
template <class S>
struct Turn {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  }
};

/// A barrier of each stage: what was brought is there; each thread of this block has read it; warps of the cluster's
/// other blocks have read what they have of the same tokens. Every thread arrives by itself, which takes as long as one
/// for its warp (within 2%, H200) and is an order that racecheck sees: of a warp's barrier the compiler leaves no
/// instruction.
struct Barriers {
  uint64_t *full, *empty, *empty_elsewhere;

  template <class S>
  __device__ __forceinline__ void wait_for_empty(int stage, uint32_t parity) const {
    wait_barrier(empty + stage, parity);
    if constexpr (S::kCluster > 1) wait_barrier(empty_elsewhere + stage, parity);
  }
};

/// The tiles of a cluster, in order. Those of a last round that has a tile for few of the clusters are split by tokens.
template <class S>
class Tiles {
 public:
  __device__ __forceinline__ explicit Tiles(const TensorCoreArgs& a) : a_(a) {
    rows_ = a.groups > 0 ? int(a.w.N) / a.groups : int(a.w.N);
    group_blocks_ = (rows_ + kBlockRows - 1) / kBlockRows;
    pairs_ = (group_blocks_ + kGroups * S::kCluster - 1) / (kGroups * S::kCluster);
    step_ = int(gridDim.x) / S::kCluster;
    next_ = int(blockIdx.x) / S::kCluster;
    if (S::kSplits && a_.groups == 0) {
      const int tiles = int((a_.M + S::kTokens - 1) / S::kTokens) * pairs_, rest = tiles % step_;
      split_ = split_of_last_round(tiles / step_, rest, step_);
      split_from_ = tiles - rest;
    }
  }
  __device__ __forceinline__ int rows() const { return rows_; }
  __device__ __forceinline__ int group_blocks() const { return group_blocks_; }

  __device__ __forceinline__ bool next(Tile& tile) {
    while (next_ - first_ >= walked_) {
      if (++group_ >= max(a_.groups, 1)) return false;
      first_ += walked_;
      begin_ = a_.groups > 0 ? a_.offsets[group_] : 0;
      end_ = a_.groups > 0 ? a_.offsets[group_ + 1] : int(a_.M);
      tiles_ = (end_ - begin_ + S::kTokens - 1) / S::kTokens * pairs_;
      walked_ = tiles_ + (S::kSplits ? (tiles_ - min(split_from_, tiles_)) * (split_ - 1) : 0);
    }
    int t = next_ - first_, part = 0;
    tile.tokens = S::kTokens;
    if (S::kSplits && split_ > 1 && t >= split_from_) {
      const int at = t - split_from_;
      tile.tokens = S::kTokens / split_, part = at % split_, t = split_from_ + at / split_;
    }
    const int token_tiles = tiles_ / pairs_;
    const int raster = t / (kRasterPairs * token_tiles), rest = t - raster * kRasterPairs * token_tiles;
    const int width = min(kRasterPairs, pairs_ - raster * kRasterPairs), column = rest / width;
    const int pair = raster * kRasterPairs + rest - column * width;
    const int rank = S::kCluster > 1 ? int(blockIdx.x) % S::kCluster : 0;
    tile.block = (pair * S::kCluster + rank) * kGroups;
    tile.group = group_;
    tile.token = begin_ + column * S::kTokens + part * tile.tokens;
    tile.end = end_;
    next_ += step_;
    return true;
  }

 private:
  const TensorCoreArgs& a_;
  int rows_, group_blocks_, pairs_, step_, next_;
  int group_ = -1, begin_ = 0, end_ = 0, tiles_ = 0;
  int walked_ = 0, first_ = 0;      // tiles with each part as one; first_: of the groups before
  int split_ = 1, split_from_ = 0;  // parts of each tile from this one on
};

template <Element kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (kType == Element::bf16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  }
}
template <Element kType>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (kType == Element::bf16)
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
  else
    return __half22float2(reinterpret_cast<const __half2&>(bits));
}

/// use(flag) with the flag as a constant.
template <class Use>
__device__ __forceinline__ void with_flag(bool flag, const Use& use) {
  flag ? use(std::true_type()) : use(std::false_type());
}

/// What becomes of a warpgroup's sums.
struct Results {
  OutputTerms low, high;   // of the thread's two outputs
  int n = 0;               // the first output, in its group
  int token = 0, end = 0;  // as of a Tile
};

/// The outputs of a warpgroup's block of 64 rows, from its staging buffers.
template <class S>
class Writer {
 public:
  /// boxed: y_map has y; else, and where a group ends within a box, threads store.
  __device__ __forceinline__ Writer(const TensorCoreArgs& a, const CUtensorMap& y_map, bool boxed, std::byte* staging,
                                    int group, int rows)
      : a_(a),
        y_map_(&y_map),
        staging_(staging),
        barrier_(1 + group),
        thread_(int(threadIdx.x) % 128),
        rows_(rows),
        boxed_(boxed) {}

  /// Asks for what is added to the first parts of a tile's tokens, as soon as staging is free.
  template <int kTokens>
  __device__ __forceinline__ void prefetch(const Results& r) const {
    constexpr int kTileParts = kTokens / kStagedTokens, kParts = kTileParts < S::kStaging ? kTileParts : S::kStaging;
    if (thread_ == 0) wait_for_reads<0>();
    sync_threads(barrier_, 128);
#pragma unroll
    for (int part = 0; part < kParts; ++part) fetch(staging_ + part * kStagedBytes, r.token + part * kStagedTokens, r);
  }

  /// kAdd: after prefetch.
  template <Element kType, bool kActivate, bool kAdd, int kSums>
  __device__ __forceinline__ void staged(const float (&sums)[kSums], const float* x_scale, const Results& r) const {
    constexpr int kParts = 2 * kSums / kStagedTokens;
    const int lane = thread_ % 32, warp = thread_ / 32;
    // Of store_turned: the lane's token of a pair of blocks of 8 tokens, and its piece of 8 outputs.
    const int place = (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
    if (thread_ == 0) wait_for_reads<0>();
    sync_threads(barrier_, 128);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      std::byte* const buffer = staging_ + part % S::kStaging * kStagedBytes;
      const int first = r.token + part * kStagedTokens;
      if constexpr (kAdd) {
        if (part >= S::kStaging) fetch(buffer, first, r);
        wait_for_copies<0>();
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
          v[i][0] = r.low.template finish<kActivate>(sums[4 * j], scale.x);
          v[i][1] = r.low.template finish<kActivate>(sums[4 * j + 1], scale.y);
          v[i][2] = r.high.template finish<kActivate>(sums[4 * j + 2], scale.x);
          v[i][3] = r.high.template finish<kActivate>(sums[4 * j + 3], scale.y);
        }
        if constexpr (kAdd) {
          MmaB old[2];
          load_b_rows(at, old[0], old[1]);
          add<kType>(v[0], old[0]), add<kType>(v[1], old[1]);
        }
        store_turned(at, pack<kType>(v[0][0], v[0][1]), pack<kType>(v[0][2], v[0][3]), pack<kType>(v[1][0], v[1][1]),
                     pack<kType>(v[1][2], v[1][3]));
      }
      fence_for_copies();
      if (part + 1 >= S::kStaging && part + 1 < kParts && thread_ == 0)
        wait_for_reads<S::kStaging == 3 ? 1 : 0>();  // of the next part's buffer
      sync_threads(barrier_, 128);
      store(buffer, first, r);
    }
  }

  template <int kSums>
  __device__ __forceinline__ void direct(const float (&sums)[kSums], const float* x_scale, const Results& r) const {
    const int lane = thread_ % 32, row = r.n + thread_ / 32 * 16 + lane / 4;
    sync_threads(barrier_, 128);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int t = i / 4 * 8 + 2 * (lane % 4) + i % 2, out = row + i / 2 % 2 * 8;
      if (r.token + t >= r.end || out >= rows_) continue;
      if (a_.write_back == WriteBack::separate) {
        a_.workspace[int64_t(out) * a_.M + r.token + t] = sums[i];
        continue;
      }
      const int64_t at = int64_t(r.token + t) * a_.y_stride + out;
      store_result(a_, at, (i / 2 % 2 == 0 ? r.low : r.high).finish(sums[i], x_scale[t]));
    }
    sync_threads(barrier_, 128);  // x_scale is read
  }

 private:
  /// f(place in the buffer, element of y, bytes) for kStagedTokens rows of 64 outputs as far as they count: 16 bytes at
  /// a time, or where these do not lie so, single values.
  template <class F>
  __device__ __forceinline__ void each(int token, const Results& r, const F& f) const {
    const int tokens = min(kStagedTokens, r.end - token);
    const int64_t base = int64_t(token) * a_.y_stride + r.n;
    if (has_whole_pieces(a_, 2) && rows_ - r.n >= kBlockRows) {
      const int row = thread_ / 8, piece = thread_ % 8;
#pragma unroll
      for (int i = 0; i < kStagedTokens / 16; ++i)
        if (16 * i + row < tokens)
          f((16 * i + row) * 128 + (piece ^ (row % 8)) * 16, base + (16 * i + row) * a_.y_stride + 8 * piece, uint4{});
      return;
    }
    const int column = thread_ % kBlockRows;
    if (r.n + column >= rows_) return;
#pragma unroll 1
    for (int row = thread_ / kBlockRows; row < tokens; row += 128 / kBlockRows)
      f(row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2, base + row * a_.y_stride + column, uint16_t{});
  }
  __device__ __forceinline__ void store(const std::byte* buffer, int token, const Results& r) const {
    if (!boxed_ || (token + kStagedTokens > r.end && r.end != a_.M))
      each(token, r, [&](int place, int64_t at, auto kind) {
        using T = decltype(kind);
        *reinterpret_cast<T*>(static_cast<uint16_t*>(a_.y) + at) = *reinterpret_cast<const T*>(buffer + place);
      });
    else if (thread_ == 0)
      store_box(y_map_, buffer, r.n, token);
    if (thread_ == 0) commit_boxes();  // of nothing too: wait_for_reads counts parts
  }
  __device__ __forceinline__ void fetch(std::byte* buffer, int token, const Results& r) const {
    each(token, r, [&](int place, int64_t at, auto kind) {
      const uint16_t* const from = static_cast<const uint16_t*>(a_.add) + at;
      if constexpr (sizeof(kind) == 16)
        copy_async(buffer + place, from);
      else
        *reinterpret_cast<uint16_t*>(buffer + place) = *from;
    });
    commit_copies();
  }
  template <Element kType>
  __device__ __forceinline__ void add(float (&v)[4], const MmaB& old) const {
    const float2 low = unpack<kType>(old.r[0]), high = unpack<kType>(old.r[1]);
    v[0] += low.x, v[1] += low.y, v[2] += high.x, v[3] += high.y;
  }

  const TensorCoreArgs& a_;
  const CUtensorMap* y_map_;
  std::byte* staging_;
  int barrier_, thread_, rows_;
  bool boxed_;
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

/// A warpgroup's share of the products of a block's tiles: the stages as they come, and results.
template <class S>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const TensorCoreArgs& a, const Writer<S>& writer, const std::byte* stages,
                                      float* x_scale, const Barriers& barriers, int group, int rows, int k_tiles)
      : a_(a),
        writer_(writer),
        stages_(stages),
        x_scale_(x_scale),
        barriers_(barriers),
        group_(group),
        thread_(int(threadIdx.x) % 128),
        rows_(rows),
        k_tiles_(k_tiles) {}

  __device__ __forceinline__ Announced next(const Announced* announced) const {
    wait_barrier(barriers_.full + turn_.stage, turn_.phase);
    return announced[turn_.stage];
  }

  template <int kTokens>
  __device__ __forceinline__ void run(const Announced& tile) {
    using Product = Step<S::kEightBits, S::kSparse, kTokens>;
    constexpr int kSums = kTokens / 2, kScales = (kTokens + 127) / 128;  // of a thread
    float sums[kSums];
    float whole[S::kFull ? kSums : 1] = {};
    float scales[kScales];
    Results results;
    [[maybe_unused]] int before = 0;  // the stage of the products before
    for (int k = 0; k < k_tiles_; ++k) {
      const int s = turn_.stage;
      wait_barrier(barriers_.full + s, turn_.phase);
      const std::byte* const stage = stages_ + s * S::kStageBytes;
      const std::byte* const values = stage + S::kTokenTileBytes + group_ * S::kBlockBytes;
      const uint64_t weights = S::kSparse ? describe_narrow_matrix(values) : describe_matrix(values);
      const uint64_t tokens = describe_matrix(stage);
      Metadata<S> metadata;
      metadata.load(values, thread_);
      begin_products();
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const uint64_t a_step = weights + 2 * step, b_step = tokens + step * (S::kStepTokenBytes / 16);
        const int add = step > 0 || (!S::kFull && k > 0);
        if (step % 2 == 0)
          Product::template run<0>(sums, a_step, b_step, metadata.words[0], add);
        else
          Product::template run<1>(sums, a_step, b_step, metadata.words[1], add);
      }
      commit_products();
      // Beside the first products: what the results need is asked for, then staged.
      if (k == 0) {
        const int n = tile.n + group_ * kBlockRows, low = n + thread_ / 32 * 16 + thread_ % 32 / 4, high = low + 8;
        results = {OutputTerms(a_, tile.base + min(low, rows_ - 1), low),
                   OutputTerms(a_, tile.base + min(high, rows_ - 1), high), n, tile.token, tile.end};
#pragma unroll
        for (int t = 0; t < kScales; ++t) {
          const int token = tile.token + thread_ + 128 * t;
          scales[t] = a_.x_scale != nullptr && token < tile.end ? a_.x_scale[token] : 1;
        }
      }
      if (k == min(1, k_tiles_ - 1)) {
#pragma unroll
        for (int t = 0; t < kScales; ++t)
          if (const int at = thread_ + 128 * t; at < kTokens) x_scale_[at] = scales[t];
        if constexpr (S::kStaged)
          if (a_.add != nullptr && results.n < rows_) writer_.template prefetch<kTokens>(results);
      }
      if constexpr (S::kDrain) {
        // The tensor core reads the metadata's registers until its products end, and nobody else protects them. The
        // other warpgroup's products fill the gap.
        wait_for_products<0>();
        metadata.keep();
        release(s);
        if constexpr (S::kFull) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) whole[i] += sums[i];
        }
      } else {
        wait_for_products<1>();  // those of the stage before are done
        if (k > 0) release(before);
        before = s;
      }
      turn_.advance();
    }
    if constexpr (!S::kDrain) {
      wait_for_products<0>();
      release(before);
    }
    if (results.n >= rows_) return;
    if constexpr (S::kFull)
      write(whole, results);
    else
      write(sums, results);
  }

 private:
  /// Once the thread has read what is announced and the metadata. Elsewhere only the tokens matter, which no thread
  /// reads: one lane of a warp tells that its products are done.
  __device__ __forceinline__ void release(int s) const {
    arrive(barriers_.empty + s);
    if constexpr (S::kCluster > 1) {
      const int lane = int(threadIdx.x) % 32;
      __syncwarp();
      if (lane < S::kCluster && lane != int(blockIdx.x) % S::kCluster) arrive_at(barriers_.empty_elsewhere + s, lane);
    }
  }
  template <int kSums>
  __device__ __forceinline__ void write(const float (&sums)[kSums], const Results& results) const {
    if constexpr (!S::kStaged)
      writer_.direct(sums, x_scale_, results);
    else
      with_flag(a_.type == Element::bf16, [&](auto brain) {
        with_flag(results.low.activate, [&](auto activate) {
          with_flag(a_.add != nullptr, [&](auto add) {
            constexpr Element kType = decltype(brain)::value ? Element::bf16 : Element::f16;
            constexpr bool kActivate = decltype(activate)::value, kAdd = decltype(add)::value;
            writer_.template staged<kType, kActivate, kAdd>(sums, x_scale_, results);
          });
        });
      });
  }

  const TensorCoreArgs& a_;
  const Writer<S>& writer_;
  const std::byte* stages_;
  float* x_scale_;
  const Barriers& barriers_;
  int group_, thread_, rows_, k_tiles_;
  Turn<S> turn_;
};

/// least_map: as map, with boxes for tiles of the least tokens.
template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    tensor_core_wgmma(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap least_map,
                      const __grid_constant__ CUtensorMap y_map, bool boxed, const __grid_constant__ TensorCoreArgs a) {
  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* const staging = shared + S::kStages * S::kStageBytes;
  float* const token_scales = reinterpret_cast<float*>(staging + kGroups * S::kStaging * kStagedBytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(token_scales + kGroups * S::kTokens);
  const Barriers barriers{full, full + kMostStages, full + 2 * kMostStages};
  Announced* const announced = reinterpret_cast<Announced*>(full + kBarriers * kMostStages);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);  // known to be the same in a warp
  const int k_tiles = int((a.w.K * (S::kEightBits ? 1 : 2) + kTokenBytes - 1) / kTokenBytes);
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      init_barrier(barriers.full + s, 1);
      init_barrier(barriers.empty + s, kGroups * kWarps * 32);
      if (S::kCluster > 1) init_barrier(barriers.empty_elsewhere + s, kGroups * kWarps * (S::kCluster - 1));
    }
    fence_barriers();
  }
  if constexpr (S::kCluster > 1)
    synchronize_cluster();
  else
    __syncthreads();
  wait_for_predecessors();

  if (group == kGroups) {
    set_registers<56, false>();
    if (threadIdx.x % 128 == 0) {
      const int rank = S::kCluster > 1 ? int(blockIdx.x) % S::kCluster : 0;
      const uint16_t ranks = S::kCluster > 1 ? (1 << S::kCluster) - 1 : 0;
      Turn<S> turn;
      Tiles<S> tiles(a);
      Tile tile;
      while (tiles.next(tile)) {
        const std::byte* blocks[kGroups];
#pragma unroll
        for (int b = 0; b < kGroups; ++b) {
          const int block = tile.group * tiles.group_blocks() + min(tile.block + b, tiles.group_blocks() - 1);
          blocks[b] = a.w.blocks + int64_t(block) * k_tiles * S::kBlockBytes;
        }
        const int share = tile.tokens / S::kCluster, first = rank * share;
        for (int k = 0; k < k_tiles; ++k) {
          const int s = turn.stage;
          std::byte* const stage = shared + s * S::kStageBytes;
          barriers.wait_for_empty<S>(s, turn.phase ^ 1);  // passes at once in the first round
          if (k == 0)
            announced[s] = {tile.block * kBlockRows, tile.group * tiles.rows(), tile.token, tile.end, tile.tokens};
          arrive_expecting(full + s, tile.tokens * kTokenBytes + kGroups * S::kBlockBytes);
          if (!S::kSplits || tile.tokens == S::kTokens) {
            copy_box(stage + first * kTokenBytes, &map, k * kTokenBytes, tile.token + first, full + s, ranks);
          } else {
            for (int at = first; at < first + share; at += S::kLeastTokens / S::kCluster)
              copy_box(stage + at * kTokenBytes, &least_map, k * kTokenBytes, tile.token + at, full + s, ranks);
          }
#pragma unroll
          for (int b = 0; b < kGroups; ++b)
            copy_bulk(stage + S::kTokenTileBytes + b * S::kBlockBytes, blocks[b] + int64_t(k) * S::kBlockBytes,
                      S::kBlockBytes, full + s);
          turn.advance();
        }
      }
      barriers.wait_for_empty<S>(turn.stage, turn.phase ^ 1);
      announced[turn.stage] = {};
      arrive(full + turn.stage);
    }
    leave<(S::kCluster > 1), 0>();
  }

  set_registers<224, true>();
  const int rows = a.groups > 0 ? int(a.w.N) / a.groups : int(a.w.N);
  const Writer<S> writer(a, y_map, boxed, staging + group * S::kStaging * kStagedBytes, group, rows);
  Consumer<S> consumer(a, writer, shared, token_scales + group * S::kTokens, barriers, group, rows, k_tiles);
  Announced tile = consumer.next(announced);
  for (; tile.tokens == S::kTokens; tile = consumer.next(announced)) consumer.template run<S::kTokens>(tile);
  if constexpr (S::kSplits) {  // a cluster's last one
    static_assert(kMostSplit == 4);
    if (tile.tokens == S::kTokens / 2)
      consumer.template run<S::kTokens / 2>(tile);
    else if (tile.tokens > 0)
      consumer.template run<S::kTokens / 4>(tile);
  }
  if (threadIdx.x % 128 == 0) wait_for_stores();
  leave<(S::kCluster > 1), 1>();
}

// ---- launches ----

/// Of `rows` rows of `columns` values, in boxes of 128 bytes by box_rows.
CUtensorMap matrix_map(CUtensorMapDataType type, int value_bytes, const void* from, int64_t rows, int64_t columns,
                       int64_t stride_bytes, int box_rows) {
  CUtensorMap map;
  const cuuint64_t size[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t stride[1] = {cuuint64_t(stride_bytes)};
  const cuuint32_t box[2] = {cuuint32_t(128 / value_bytes), cuuint32_t(box_rows)}, element[2] = {1, 1};
  const CUresult result = tensor_map_encoder()(&map, type, 2, const_cast<void*>(from), size, stride, box, element,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error("the driver refuses a tensor map of {} tokens of {} values of {} bytes, {} bytes apart (error {})",
                rows, columns, value_bytes, stride_bytes, int(result));
  return map;
}

template <class S>
void launch(const Device& device, Stream& stream, const TensorCoreArgs& a) {
  const auto kernel = tensor_core_wgmma<S>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared));
  const int64_t rows = a.groups > 0 ? a.w.N / a.groups : a.w.N;
  const int64_t pairs = (rows + kBlockRows * kGroups * S::kCluster - 1) / (kBlockRows * kGroups * S::kCluster);
  const int64_t most = (a.M + S::kTokens - 1) / S::kTokens + a.groups;  // a group may begin a tile of tokens
  const int64_t clusters = std::min<int64_t>(pairs * most, device.info().multiprocessors / S::kCluster);
  const auto tokens_map = [&](int box_rows) {
    return matrix_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.x, a.M, a.w.K * (S::kEightBits ? 1 : 2), a.x_stride,
                      box_rows);
  };
  const CUtensorMap x_map = tokens_map(S::kTokens / S::kCluster);
  const CUtensorMap least_map = S::kSplits ? tokens_map(S::kLeastTokens / S::kCluster) : x_map;
  const bool boxed = S::kStaged && rows % 8 == 0 && a.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0;
  CUtensorMap y_map{};
  if (boxed) y_map = matrix_map(CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, a.y, a.M, rows, a.y_stride * 2, kStagedTokens);
  launch_kernel(device, stream, kernel, {dim3(unsigned(clusters * S::kCluster)), kThreads, S::kShared, S::kCluster},
                x_map, least_map, y_map, boxed, a);
}

template <bool kEightBits, bool kSparse, bool kFull, int kTokens, int kCluster>
constexpr WgmmaRow row() {
  using S = Shape<kEightBits, kSparse, kFull, kTokens, kCluster>;
  return {{kGroups * kBlockRows, kTokens, kCluster}, launch<S>};
}

}  // namespace
}  // namespace lacuna::cuda
