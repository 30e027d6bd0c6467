// src/kernels/cuda/column_statistics.cu - statistics of columns and X^T X of column_statistics.h.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "kernels/cuda/column_statistics.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kColumns = 64;  // of a block: a lane of each warp has two
constexpr int kMostWarps = 32;

/// Inputs k and k + 1 of token m, zeros past K; k is even.
__device__ __forceinline__ float2 load_two(const ColumnInputs& inputs, int64_t m, int64_t k) {
  if (k >= inputs.K) return make_float2(0, 0);
  const unsigned pair = __ldcg(reinterpret_cast<const unsigned*>(inputs.x + m * inputs.stride + k));
  return make_float2(__uint_as_float(pair << 16), k + 1 < inputs.K ? __uint_as_float(pair & 0xffff0000u) : 0.0f);
}

/// A block has kColumns columns; its warps share the tokens out, and their sums are added up in a fixed order.
__global__ void __launch_bounds__(32 * kMostWarps)
    column_sums(const __grid_constant__ ColumnInputs inputs, const __grid_constant__ ColumnSums sums) {
  __shared__ double squares[kMostWarps][kColumns];
  __shared__ float least[kMostWarps][kColumns], most[kMostWarps][kColumns];
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  const int64_t first = int64_t(blockIdx.x) * kColumns, k = first + 2 * lane;
  double square[2] = {};
  float low[2] = {INFINITY, INFINITY}, high[2] = {-INFINITY, -INFINITY};
#pragma unroll 8
  for (int64_t m = warp; m < inputs.M; m += warps) {
    const float2 two = load_two(inputs, m, k);
    const float values[2] = {two.x, two.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      square[i] += double(values[i]) * double(values[i]);
      low[i] = fminf(low[i], values[i]);
      high[i] = fmaxf(high[i], values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    squares[warp][2 * lane + i] = square[i];
    least[warp][2 * lane + i] = low[i];
    most[warp][2 * lane + i] = high[i];
  }
  __syncthreads();
  for (int column = int(threadIdx.x); column < kColumns && first + column < inputs.K; column += int(blockDim.x)) {
    double square_of_all = squares[0][column];
    float least_of_all = least[0][column], most_of_all = most[0][column];
    for (int w = 1; w < warps; ++w) {
      square_of_all += squares[w][column];
      least_of_all = fminf(least_of_all, least[w][column]);
      most_of_all = fmaxf(most_of_all, most[w][column]);
    }
    const int64_t at = first + column;
    sums.squares[at] = __ldcg(sums.squares + at) + square_of_all;
    sums.least[at] = fminf(__ldcg(sums.least + at), least_of_all);
    sums.most[at] = fmaxf(__ldcg(sums.most + at), most_of_all);
  }
}

/// In double precision, as calibrate::ColumnStatistics finds it.
__device__ __forceinline__ int bin_of(float value, float least, float most) {
  const double width = double(most) - double(least);
  if (!(width > 0)) return 0;
  return min(max(int((double(value) - double(least)) / width * kColumnBins), 0), kColumnBins - 1);
}

struct CountArgs {
  ColumnInputs inputs;
  const float* least;
  const float* most;
  uint32_t* counts;
};

/// As column_sums; whole numbers add up to the same in any order.
__global__ void __launch_bounds__(32 * kMostWarps) column_counts(const __grid_constant__ CountArgs a) {
  __shared__ unsigned counts[kColumnBins * kColumns];  // of a bin all columns
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  const int64_t first = int64_t(blockIdx.x) * kColumns, k = first + 2 * lane;
  for (int i = int(threadIdx.x); i < kColumnBins * kColumns; i += int(blockDim.x)) counts[i] = 0;
  __syncthreads();
  float least[2] = {}, most[2] = {};
  for (int i = 0; i < 2; ++i)
    if (k + i < a.inputs.K) least[i] = __ldcg(a.least + k + i), most[i] = __ldcg(a.most + k + i);
#pragma unroll 4
  for (int64_t m = warp; m < a.inputs.M; m += warps) {
    const float2 two = load_two(a.inputs, m, k);
    atomicAdd(&counts[bin_of(two.x, least[0], most[0]) * kColumns + 2 * lane], 1u);
    atomicAdd(&counts[bin_of(two.y, least[1], most[1]) * kColumns + 2 * lane + 1], 1u);
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kColumnBins * kColumns; i += int(blockDim.x)) {
    const int column = i / kColumnBins, bin = i % kColumnBins;
    uint32_t* const to = a.counts + first * kColumnBins + i;
    if (first + column < a.inputs.K) *to = __ldcg(to) + counts[bin * kColumns + column];
  }
}

constexpr int kTile = 64;       // rows and columns of X^T X of a block
constexpr int kTileDepth = 16;  // tokens in shared memory
constexpr int kTileThreads = 256;
constexpr int kEdge = 4;               // rows and columns of a thread
constexpr int64_t kFloatTokens = 256;  // summed in float32

/// kTileDepth tokens from m on, zeros from `end` on, of kTile columns from `first` on.
__device__ __forceinline__ void load_columns(const ColumnInputs& inputs, int64_t m, int64_t end, int64_t first,
                                             float (&to)[kTileDepth][kTile]) {
#pragma unroll
  for (int i = int(threadIdx.x); i < kTileDepth * kTile / 2; i += kTileThreads) {
    const int token = i / (kTile / 2), column = i % (kTile / 2) * 2;
    const float2 two = m + token < end ? load_two(inputs, m + token, first + column) : make_float2(0, 0);
    *reinterpret_cast<float2*>(&to[token][column]) = two;
  }
}

/// A block has a tile on or above the diagonal, a thread kEdge x kEdge of its values.
__global__ void __launch_bounds__(kTileThreads)
    second_moment(const __grid_constant__ ColumnInputs inputs, double* sums) {
  __shared__ __align__(16) float rows[kTileDepth][kTile];
  __shared__ __align__(16) float columns[kTileDepth][kTile];
  launch_dependents();
  wait_for_predecessors();
  if (blockIdx.y > blockIdx.x) return;
  const int64_t first_row = int64_t(blockIdx.y) * kTile, first_column = int64_t(blockIdx.x) * kTile;
  const int row = int(threadIdx.x) / (kTile / kEdge) * kEdge, column = int(threadIdx.x) % (kTile / kEdge) * kEdge;
  double total[kEdge][kEdge] = {};
  for (int64_t begin = 0; begin < inputs.M; begin += kFloatTokens) {
    const int64_t end = min(begin + kFloatTokens, inputs.M);
    float sum[kEdge][kEdge] = {};
    for (int64_t m = begin; m < end; m += kTileDepth) {
      __syncthreads();  // the tokens before are not read any more
      load_columns(inputs, m, end, first_row, rows);
      load_columns(inputs, m, end, first_column, columns);
      __syncthreads();
#pragma unroll
      for (int token = 0; token < kTileDepth; ++token) {
        const float4 left = *reinterpret_cast<const float4*>(&rows[token][row]);
        const float4 right = *reinterpret_cast<const float4*>(&columns[token][column]);
        const float a[kEdge] = {left.x, left.y, left.z, left.w}, b[kEdge] = {right.x, right.y, right.z, right.w};
#pragma unroll
        for (int i = 0; i < kEdge; ++i)
#pragma unroll
          for (int j = 0; j < kEdge; ++j) sum[i][j] += a[i] * b[j];  // of two bf16: exact
      }
    }
#pragma unroll
    for (int i = 0; i < kEdge; ++i)
#pragma unroll
      for (int j = 0; j < kEdge; ++j) total[i][j] += double(sum[i][j]);
  }
#pragma unroll
  for (int i = 0; i < kEdge; ++i)
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      const int64_t at_row = first_row + row + i, at_column = first_column + column + j;
      if (at_row > at_column || at_column >= inputs.K) continue;
      double* const to = sums + at_row * inputs.K - at_row * (at_row - 1) / 2 + at_column - at_row;
      *to = __ldcg(to) + total[i][j];
    }
}

void check_inputs(const ColumnInputs& inputs) {
  if (inputs.K < 1 || inputs.stride < inputs.K || inputs.stride % 2 != 0 ||
      reinterpret_cast<uintptr_t>(inputs.x) % 4 != 0)
    throw Error("statistics of {} inputs of rows {} values apart; rows must be aligned to 4 bytes", inputs.K,
                inputs.stride);
}

unsigned blocks_of(int64_t K) { return unsigned((K + kColumns - 1) / kColumns); }
int threads_of(int64_t M) { return int(32 * std::min<int64_t>(M, kMostWarps)); }

}  // namespace

void launch_column_sums(const Device& device, Stream& stream, const ColumnInputs& inputs, const ColumnSums& sums) {
  if (inputs.M <= 0) return;
  check_inputs(inputs);
  launch_kernel(device, stream, column_sums, {dim3(blocks_of(inputs.K)), threads_of(inputs.M)}, inputs, sums);
}

void launch_column_counts(const Device& device, Stream& stream, const ColumnInputs& inputs, const float* least,
                          const float* most, uint32_t* counts) {
  if (inputs.M <= 0) return;
  check_inputs(inputs);
  launch_kernel(device, stream, column_counts, {dim3(blocks_of(inputs.K)), threads_of(inputs.M)},
                CountArgs{inputs, least, most, counts});
}

void launch_second_moment(const Device& device, Stream& stream, const ColumnInputs& inputs, double* sums) {
  if (inputs.M <= 0) return;
  check_inputs(inputs);
  const auto tiles = unsigned((inputs.K + kTile - 1) / kTile);
  if (tiles > 65535) throw Error("a second moment of {} inputs is too large", inputs.K);
  launch_kernel(device, stream, second_moment, {dim3(tiles, tiles), kTileThreads}, inputs, sums);
}

}  // namespace lacuna::cuda
