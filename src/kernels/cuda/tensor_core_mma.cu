// src/kernels/cuda/tensor_core_mma.cu - the product of tensor_core.h with mma.sync and mma.sp.sync. A block has 128
// outputs by 128 tokens, a warp 64 (one row of blocks of the weight) by 32 of them; 128 bytes of inputs at a time come
// through a ring of stages in shared memory.
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tensor_core_mma.h"
#include "kernels/cuda/tensor_core_store.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kOutputs = 128, kTokens = 128, kThreads = 256, kStages = 3;
constexpr int kWarpOutputs = int(kTileRowsOfWeights), kWarpTokens = 32, kWarpsAlongTokens = kTokens / kWarpTokens;
constexpr int kRowTiles = kWarpOutputs / 16, kColumnTiles = kWarpTokens / 8;  // of an mma
constexpr int kStageColumns = int(kTileInputBytes);                           // in bytes
constexpr int kXBytes = kTokens * kStageColumns;
constexpr int kBand = 8;  // tiles of tokens whose blocks run side by side, so that both matrices come from L2
constexpr int kStagedRow = kOutputs + 4;  // floats of a token; the gap keeps lanes off each other's banks

using Sums = float[kRowTiles][kColumnTiles][4];

/// Sizes in bytes.
template <bool kEightBits, bool kSparse>
struct Stage {
  static constexpr int kValueRow = kSparse ? kStageColumns / 2 : kStageColumns;
  static constexpr int kValues = kWarpOutputs * kValueRow;
  static constexpr int kBlock = kValues + (kSparse ? (kEightBits ? 1024 : 512) : 0);  // of the weight
  static constexpr int kBytes = kXBytes + 2 * kBlock;
};
/// Behind the stages.
struct Prefetched {
  std::byte terms[kOutputs * sizeof(OutputTerms)];
  float x_scale[kTokens];
};
template <bool kEightBits, bool kSparse>
constexpr int kSharedBytes = kStages* Stage<kEightBits, kSparse>::kBytes + int(sizeof(Prefetched));
static_assert(kSharedBytes<true, false> <= 99 * 1024, "what a block of compute capability 8.9 can have");
static_assert(kTokens * kStagedRow * 4 <= kStages * Stage<false, true>::kBytes, "results take the stages' place");

/// What a block makes. Outputs are counted in their group.
struct Tile {
  int group, outputs, first_output;
  int64_t first_token, end_token;  // the end: of the group's tokens
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/// At least as many tiles of tokens as the groups have together.
__host__ __device__ __forceinline__ int64_t token_tiles(int64_t M, int groups) {
  return groups > 0 ? M / kTokens + groups : (M + kTokens - 1) / kTokens;
}

/// False: none is left for this block.
__device__ __forceinline__ bool find_tile(const TensorCoreArgs& a, Tile& tile) {
  tile.outputs = int(outputs_of_group(a));
  const int output_tiles = (tile.outputs + kOutputs - 1) / kOutputs, of_band = kBand * output_tiles;
  const int band = int(blockIdx.x) / of_band, in_band = int(blockIdx.x) % of_band;
  const int width = min(kBand, int(token_tiles(a.M, a.groups)) - band * kBand);
  tile.first_output = in_band / width * kOutputs;
  int64_t before = int64_t{band} * kBand + in_band % width;  // tiles of tokens
  for (tile.group = 0; tile.group < max(a.groups, 1); ++tile.group) {
    const TokenRange tokens = tokens_of_group(a, tile.group);
    const int64_t tiles = (tokens.end - tokens.begin + kTokens - 1) / kTokens;
    if (before < tiles) {
      tile.first_token = tokens.begin + before * kTokens;
      tile.end_token = tokens.end;
      return true;
    }
    before -= tiles;
  }
  return false;
}

__device__ __forceinline__ int x_place(int token, int piece) {
  return token * kStageColumns + ((piece ^ (token % 8)) << 4);
}
template <bool kSparse>
__device__ __forceinline__ int w_place(int row, int piece) {
  if constexpr (kSparse)
    return row * (kStageColumns / 2) + ((piece ^ (row / 2 % 4)) << 4);
  else
    return row * kStageColumns + ((piece ^ (row % 8)) << 4);
}

/// The same 128 bytes of inputs of the tile's tokens and of two rows of blocks of the weight.
template <bool kEightBits, bool kSparse>
class Source {
 public:
  __device__ __forceinline__ Source(const TensorCoreArgs& a, const Tile& tile)
      : a_(a), tile_(tile), row_bytes_(a.w.K * (kEightBits ? 1 : 2)) {
    const int64_t row = int64_t{tile.group} * tile.outputs + tile.first_output;
    w_ = a.w.blocks + row / kTileRowsOfWeights * stages() * kBlock;
    // A group's last tile may have one row of blocks alone; its second half is never stored.
    second_ = tile.first_output + kWarpOutputs < tile.outputs ? stages() * kBlock : 0;
  }
  __device__ __forceinline__ int stages() const { return int((row_bytes_ + kStageColumns - 1) / kStageColumns); }

  /// Every thread copies its pieces.
  __device__ __forceinline__ void load(std::byte* to, int stage) const {
    constexpr int kPiecesOfRow = kStageColumns / 16;
    const int piece = int(threadIdx.x) % kPiecesOfRow;
    const int64_t column = int64_t{stage} * kStageColumns + piece * 16, left = row_bytes_ - column;
#pragma unroll
    for (int token = int(threadIdx.x) / kPiecesOfRow; token < kTokens; token += kThreads / kPiecesOfRow) {
      const int64_t m = tile_.first_token + token;
      const int bytes = m < tile_.end_token ? int(min(max(left, int64_t{0}), int64_t{16})) : 0;
      copy_some_async(to + x_place(token, piece), bytes > 0 ? a_.x + m * a_.x_stride + column : a_.x, bytes);
    }
    const std::byte* const from = w_ + int64_t{stage} * kBlock;
#pragma unroll
    for (int at = int(threadIdx.x) * 16; at < 2 * kBlock; at += kThreads * 16)
      copy_async(to + kXBytes + at, at < kBlock ? from + at : from + second_ + (at - kBlock));
  }

 private:
  static constexpr int kBlock = Stage<kEightBits, kSparse>::kBlock;
  const TensorCoreArgs& a_;
  const Tile& tile_;
  int64_t row_bytes_, second_;
  const std::byte* w_;
};

/// x: the stage's tokens; w: the warp's block.
template <bool kEightBits>
__device__ __forceinline__ void multiply_dense(Sums& sums, const std::byte* x, int token, const std::byte* w) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int step = 0; step < kStageColumns / 32; ++step) {
    MmaA a[kRowTiles];
    MmaB b[kColumnTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) a[i] = load_a(w + w_place<false>(16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2)
      load_b(x + x_place(token + 8 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), b[j], b[j + 1]);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        if constexpr (kEightBits)
          multiply_e4m3(sums[i][j], a[i], b[j]);
        else
          multiply_bf16(sums[i][j], a[i], b[j]);
      }
  }
}
template <bool kEightBits>
__device__ __forceinline__ void multiply_sparse(Sums& sums, const std::byte* x, int token, const std::byte* w) {
  const int lane = int(threadIdx.x) % 32;
  const auto* const metadata = reinterpret_cast<const uint32_t*>(w + Stage<kEightBits, true>::kValues);
#pragma unroll
  for (int step = 0; step < kStageColumns / 64; ++step) {
    MmaA a[kRowTiles];
    MmaSparseB b[kColumnTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) a[i] = load_a(w + w_place<true>(16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
      b[j] = load_sparse_b(x + x_place(token + 8 * j + lane % 8, 4 * step + lane / 8));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const uint32_t places = metadata[kEightBits ? (32 * i + lane) * 2 + step : 32 * i + lane];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        if constexpr (kEightBits)
          multiply_sparse_e4m3(sums[i][j], a[i], b[j], places);
        else if (step == 0)
          multiply_sparse_bf16<0>(sums[i][j], a[i], b[j], places);
        else
          multiply_sparse_bf16<1>(sums[i][j], a[i], b[j], places);
      }
    }
  }
}

template <bool kEightBits, bool kSparse>
__device__ __forceinline__ void multiply_stage(Sums& sums, const std::byte* x, int token, const std::byte* w) {
  if constexpr (kSparse)
    multiply_sparse<kEightBits>(sums, x, token, w);
  else
    multiply_dense<kEightBits>(sums, x, token, w);
}

/// use(output, token, sum) for each sum of a thread; counted in the tile.
template <class Use>
__device__ __forceinline__ void each_sum(const Sums& sums, const Use& use) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int output = warp / kWarpsAlongTokens * kWarpOutputs + lane / 4;
  const int token = warp % kWarpsAlongTokens * kWarpTokens + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) use(output + 16 * i + 8 * half, token + 8 * j + e, sums[i][j][2 * half + e]);
}

__device__ __forceinline__ void prefetch_terms(const TensorCoreArgs& a, const Tile& tile, Prefetched& to) {
  const int i = int(threadIdx.x);
  if (i < kOutputs && tile.first_output + i < tile.outputs) {
    const int64_t output = tile.first_output + i;
    reinterpret_cast<OutputTerms*>(to.terms)[i] = OutputTerms(a, int64_t{tile.group} * tile.outputs + output, output);
  }
  if (i < kTokens && tile.first_token + i < tile.end_token)
    to.x_scale[i] = a.x_scale != nullptr ? __ldcg(a.x_scale + tile.first_token + i) : 1.0f;
}

/// Through shared memory: whole pieces of a token's outputs at once.
template <Element kType>
__device__ __forceinline__ void store_staged(const TensorCoreArgs& a, const Tile& tile, const float* staged) {
  constexpr int kCount = ResultPiece<kType>::kCount, kPieces = kOutputs / kCount;
  const bool whole = has_whole_pieces(a, 16 / kCount);
  for (int i = int(threadIdx.x); i < kTokens * kPieces; i += kThreads) {
    const int token = i / kPieces, output = tile.first_output + i % kPieces * kCount;
    if (tile.first_token + token >= tile.end_token || output >= tile.outputs) continue;
    const int64_t at = (tile.first_token + token) * a.y_stride + output;
    float v[kCount];
#pragma unroll
    for (int four = 0; four < kCount; four += 4) {
      const float4 values = *reinterpret_cast<const float4*>(staged + token * kStagedRow + i % kPieces * kCount + four);
      v[four] = values.x, v[four + 1] = values.y, v[four + 2] = values.z, v[four + 3] = values.w;
    }
    if (whole && output + kCount <= tile.outputs) {
      ResultPiece<kType>::store(a, at, v);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        if (output + k < tile.outputs) store_result(a, at + k, v[k]);
    }
  }
}

/// The product alone, transposed: workspace [outputs, M].
__device__ __forceinline__ void store_product(const TensorCoreArgs& a, const Tile& tile, const Sums& sums) {
  each_sum(sums, [&](int output, int token, float sum) {
    if (tile.first_output + output < tile.outputs && tile.first_token + token < tile.end_token)
      a.workspace[(tile.first_output + output) * a.M + tile.first_token + token] = sum;
  });
}

template <bool kEightBits, bool kSparse, bool kFull>
__device__ __forceinline__ void make_tile(const TensorCoreArgs& a, const Tile& tile) {
  constexpr int kStageBytes = Stage<kEightBits, kSparse>::kBytes;
  std::byte* const stages = dynamic_shared<std::byte>();
  auto& prefetched = *reinterpret_cast<Prefetched*>(stages + kStages * kStageBytes);
  const int warp = int(threadIdx.x) / 32, token0 = warp % kWarpsAlongTokens * kWarpTokens;
  const int block0 = kXBytes + warp / kWarpsAlongTokens * Stage<kEightBits, kSparse>::kBlock;
  const Source<kEightBits, kSparse> source(a, tile);
  const int count = source.stages();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < count) source.load(stages + s * kStageBytes, s);
    commit_copies();
  }
  if (a.write_back != WriteBack::separate) prefetch_terms(a, tile, prefetched);

  Sums sums = {};
  for (int t = 0; t < count; ++t) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the stage is here, and nobody reads the one before it
    if (const int next = t + kStages - 1; next < count) source.load(stages + next % kStages * kStageBytes, next);
    commit_copies();
    const std::byte* const stage = stages + t % kStages * kStageBytes;
    if constexpr (kFull) {
      Sums of_stage = {};
      multiply_stage<kEightBits, kSparse>(of_stage, stage, token0, stage + block0);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][j][e] += of_stage[i][j][e];
    } else {
      multiply_stage<kEightBits, kSparse>(sums, stage, token0, stage + block0);
    }
  }
  __syncthreads();  // nobody reads stages any more, and terms are here

  if (a.write_back == WriteBack::separate) return store_product(a, tile, sums);
  const auto* const terms = reinterpret_cast<const OutputTerms*>(prefetched.terms);
  const auto result = [&](int output, int token, float sum) {
    return terms[output].finish(sum, prefetched.x_scale[token]);
  };
  if (a.write_back == WriteBack::staged) {
    auto* const staged = reinterpret_cast<float*>(stages);
    each_sum(sums, [&](int output, int token, float sum) {
      staged[token * kStagedRow + output] = result(output, token, sum);
    });
    __syncthreads();
    with_element(a.type, [&](auto type) { store_staged<type.value>(a, tile, staged); });
  } else {
    each_sum(sums, [&](int output, int token, float sum) {
      if (tile.first_output + output < tile.outputs && tile.first_token + token < tile.end_token)
        store_result(a, (tile.first_token + token) * a.y_stride + tile.first_output + output,
                     result(output, token, sum));
    });
  }
}

template <bool kEightBits, bool kSparse, bool kFull>
__global__ void __launch_bounds__(kThreads, 1) tensor_core_mma(const __grid_constant__ TensorCoreArgs a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  if constexpr (!kEightBits)  // the instruction is missing; launch() refuses
#endif
  {
    launch_dependents();
    wait_for_predecessors();
    if (Tile tile; find_tile(a, tile)) make_tile<kEightBits, kSparse, kFull>(a, tile);
  }
}

template <bool kEightBits, bool kSparse, bool kFull>
void launch(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  const auto kernel = tensor_core_mma<kEightBits, kSparse, kFull>;
  if constexpr (kEightBits) {
    cudaFuncAttributes code;
    check_cuda(cudaFuncGetAttributes(&code, kernel));
    if (code.binaryVersion < 89)
      throw Error(
          "{} has compute capability {}.{}, but this build holds FP8 code for less; build with 89 or 90 among "
          "CMAKE_CUDA_ARCHITECTURES",
          device.info().name, device.info().major, device.info().minor);
  }
  const int64_t outputs = args.groups > 0 ? args.w.N / args.groups : args.w.N;
  const int64_t blocks = token_tiles(args.M, args.groups) * ceil_div(outputs, kOutputs);
  if (blocks > int64_t{1} << 30)
    throw Error("a product of {} tokens and {} outputs is too large for one launch", args.M, outputs);
  constexpr int kShared = kSharedBytes<kEightBits, kSparse>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_kernel(device, stream, kernel, {dim3(unsigned(blocks)), kThreads, kShared}, args);
}

}  // namespace

void launch_tensor_core_mma(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  const bool full = args.accumulate == Accumulate::full, sparse = args.w.operation.sparse;
  if (!args.w.operation.eight_bits)  // sums of bf16 are kept in float32 as they are
    return sparse ? launch<false, true, false>(device, stream, args)
                  : launch<false, false, false>(device, stream, args);
  if (sparse)
    return full ? launch<true, true, true>(device, stream, args) : launch<true, true, false>(device, stream, args);
  return full ? launch<true, false, true>(device, stream, args) : launch<true, false, false>(device, stream, args);
}

}  // namespace lacuna::cuda
