// src/kernels/cuda/rows.cuh - the row kernels for any Frag (rows_frag.cuh). For rows_*.cu.
//
// A team of `ways` warps has a range of rows and takes them kRows at a time; its warps share a row's chunks (32 kCols
// columns each). While a chunk is multiplied the next one is under way, of the next rows too. x lies in shared memory,
// in the order in which the lanes read it, for as long as the block lives; of several tokens one after the other.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/rows_frag.cuh"

namespace lacuna::cuda {

inline constexpr int kMostParts = 4, kMostWays = 8;

struct RowsParams {
  struct Part {
    const std::byte* data;
    const float* bias;
    float* y;
    int first;  // row of the launch
  } part[kMostParts];
  int parts, rows;
  uint32_t K, plane[kMostPlanes], group_factor;
  int64_t row_bytes;
  int first_chunk, chunks;  // those of this launch
  bool accumulate;          // y += instead of y =
  int ways;
  const float *x, *norms;
  float threshold;
  int tokens;
  int64_t x_stride, y_stride;  // of tokens
};

/// x in shared memory: float4 `quad` of lane l's columns of a chunk; a lane more than there are keeps both the reads
/// and the writes free of bank conflicts.
template <class Frag>
__device__ __forceinline__ constexpr int staged_at(int chunk, int quad, int lane) {
  return (chunk * (Frag::kCols / 4) + quad) * 33 + lane;
}
/// Bytes of shared memory for so many chunks: x, then the sums of each half unit.
template <class Frag>
constexpr int64_t staged_bytes(int64_t chunks) {
  return chunks * (Frag::kCols / 4 * 33 * 16 + (Frag::kNeedsSums ? 32 * 8 : 0));
}

/// Columns k to k + 3 of a token's x; zeros beyond K and where not active.
__device__ __forceinline__ float4 load_inputs(const RowsParams& p, const float* x, int64_t k) {
  float v[4] = {};
  if (k + 4 <= p.K) {
    const float4 whole = __ldcg(reinterpret_cast<const float4*>(x + k));
    v[0] = whole.x, v[1] = whole.y, v[2] = whole.z, v[3] = whole.w;
  } else {
    for (int i = 0; i < 4; ++i)
      if (k + i < p.K) v[i] = __ldcg(x + k + i);
  }
  if (p.threshold > 0)
    for (int i = 0; i < 4; ++i) {
      const float size = p.norms == nullptr || k + i >= p.K ? fabsf(v[i]) : fabsf(v[i]) * __ldg(p.norms + k + i);
      if (size < p.threshold) v[i] = 0;
    }
  return make_float4(v[0], v[1], v[2], v[3]);
}

template <class Frag>
__device__ __forceinline__ void stage_inputs(const RowsParams& p, const float* x, float4* inputs, float* input_sums) {
  constexpr int kQuads = Frag::kCols / 4, kBatch = 4;  // loads in flight
  const int quads = p.chunks * kQuads * 32;            // a multiple of 32: whole warps go through
  for (int f0 = threadIdx.x; f0 < quads; f0 += kBatch * blockDim.x) {
    float4 v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int f = f0 + b * blockDim.x;
      if (f < quads) v[b] = load_inputs(p, x, (int64_t(p.first_chunk) * kQuads * 32 + f) * 4);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int f = f0 + b * blockDim.x;
      if (f >= quads) break;
      const int3 at = Frag::place(f);
      inputs[staged_at<Frag>(at.x, at.y, at.z)] = v[b];
      if constexpr (Frag::kNeedsSums) {
        float sum = (v[b].x + v[b].y) + (v[b].z + v[b].w);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (f % 4 == 0) input_sums[f / 4] = sum;
      }
    }
  }
}

/// Where row n of the launch is.
struct PlacedRow {
  int part, row;
};
__device__ __forceinline__ PlacedRow place_row(const RowsParams& p, int n) {
  int part = 0, first = 0;
#pragma unroll
  for (int i = 1; i < kMostParts; ++i)
    if (i < p.parts && n >= p.part[i].first) part = i, first = p.part[i].first;
  return {part, n - first};
}

/// Sums over the lanes; lane r gets that of row r. Halves of the warp keep half of the rows each as long as there are
/// two.
template <int kRows>
__device__ __forceinline__ float sum_rows(const float sum[kRows], int lane) {
  float v[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) v[r] = sum[r];
  int step = 16;
#pragma unroll
  for (int rows = kRows; rows > 1; rows /= 2, step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int r = 0; r < rows / 2; ++r) {
      const float keep = upper ? v[r + rows / 2] : v[r], give = upper ? v[r] : v[r + rows / 2];
      v[r] = keep + __shfl_xor_sync(~0u, give, step);
    }
  }
#pragma unroll
  for (; step > 0; step /= 2) v[0] += __shfl_xor_sync(~0u, v[0], step);
  // Row r is now in the lanes whose upper bits are r.
  return kRows == 1 ? v[0] : __shfl_sync(~0u, v[0], lane % kRows * (32 / kRows));
}

/// kTokens: as many as p.tokens or more.
template <class Frag, int kRows, int kWarps, int kTokens>
__global__ void __launch_bounds__(kWarps * 32, 1) multiply_rows(const __grid_constant__ RowsParams p) {
  constexpr int kQuads = Frag::kCols / 4;  // of a lane and chunk
  constexpr int kSums = kRows * kTokens;   // that the warps of a team share, of row r and token t at r kTokens + t
  float4* const inputs = dynamic_shared<float4>();
  __shared__ float shares[2][kWarps][kSums];
  const int of_token = staged_at<Frag>(p.chunks, 0, 0);
  float* const input_sums = reinterpret_cast<float*>(inputs + kTokens * of_token);  // [kTokens][chunks][32][2]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int way = warp % p.ways, team = blockIdx.x * (warps / p.ways) + warp / p.ways;
  const int teams = gridDim.x * (warps / p.ways);
  const int end = int(int64_t(p.rows) * (team + 1) / teams);
  int n = int(int64_t(p.rows) * team / teams), chunk = way;

  using Units = typename Frag::Unit[kRows];
  const std::byte* row[kRows];
  const auto load = [&](Units& unit) {
    if (n >= end) return;
    if (chunk == way) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const PlacedRow at = place_row(p, min(n + r, end - 1));
        row[r] = p.part[at.part].data + int64_t(at.row) * p.row_bytes;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      unit[r] = Frag::load({row[r], p.plane, p.K, p.group_factor}, p.first_chunk + chunk, lane);
  };

  float sum[kSums] = {};
  int round = 0;
  /// Multiplies what was loaded into `unit` while what follows is loaded into `next`. False: nothing was left.
  const auto step = [&](const Units& unit, Units& next) {
    if (n >= end) return false;
    const int now = n, c = chunk;
    chunk += p.ways;
    const bool whole = chunk >= p.chunks;
    if (whole) chunk = way, n += kRows;
    load(next);

    float s[kSums][2] = {};
    const float4* const x_at = inputs + staged_at<Frag>(c, 0, lane);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float4 x[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) x[m] = x_at[m * of_token + staged_at<Frag>(0, j, 0)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 w = Frag::values(unit[r], j);
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
          float& t = s[r * kTokens + m][j / (kQuads / 2)];
          t = fmaf(w.x, x[m].x, t), t = fmaf(w.y, x[m].y, t), t = fmaf(w.z, x[m].z, t), t = fmaf(w.w, x[m].w, t);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      float2 x_sums = make_float2(0, 0);
      if constexpr (Frag::kNeedsSums)
        x_sums = reinterpret_cast<const float2*>(input_sums)[(m * p.chunks + c) * 32 + lane];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r * kTokens + m] += Frag::finish(unit[r], lane, s[r * kTokens + m], x_sums);
    }
    if (!whole) return true;

    float mine = sum_rows<kSums>(sum, lane);  // sum `lane`
#pragma unroll
    for (int r = 0; r < kSums; ++r) sum[r] = 0;
    if (p.ways > 1) {
      // The shares of one round are read before any warp of the team writes those of the round after the next.
      if (lane < kSums) shares[round][warp][lane] = mine;
      sync_threads(1 + warp / p.ways, 32 * p.ways);
      if (way == 0 && lane < kSums) {
        mine = 0;
        for (int w = 0; w < p.ways; ++w) mine += shares[round][warp + w][lane];
      }
      round ^= 1;
    }
    const int output = now + lane / kTokens, token = lane % kTokens;
    if (way == 0 && lane < kSums && output < end && token < p.tokens) {
      const PlacedRow at = place_row(p, output);
      float* const y = p.part[at.part].y + token * p.y_stride + at.row;
      if (p.accumulate)
        mine += *y;
      else if (p.part[at.part].bias != nullptr)
        mine += __ldg(p.part[at.part].bias + at.row);
      *y = mine;
    }
    return true;
  };

  Units even, odd;
  launch_dependents();
  load(even);  // weights do not depend on earlier kernels
  wait_for_predecessors();
  for (int m = 0; m < kTokens; ++m)  // those beyond p.tokens are not stored
    stage_inputs<Frag>(p, p.x + (m < p.tokens ? m : 0) * p.x_stride, inputs + m * of_token,
                       input_sums + m * p.chunks * 64);
  __syncthreads();
  while (step(even, odd) && step(odd, even)) {
  }
}

template <class Frag>
__global__ void __launch_bounds__(128)
    embed_rows(const __grid_constant__ RowsParams p, const int32_t* ids, float* out) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = threadIdx.x % 32, chunk = blockIdx.x * 4 + threadIdx.x / 32, id = __ldcg(ids + blockIdx.y);
  if (chunk >= p.chunks) return;
  const bool known = id >= 0 && id < p.rows;
  const RowView row{p.part[0].data + (known ? id : 0) * p.row_bytes, p.plane, p.K, p.group_factor};
  const auto unit = Frag::load(row, chunk, lane);
  float* const to = out + int64_t(blockIdx.y) * p.K;
#pragma unroll
  for (int j = 0; j < Frag::kCols / 4; ++j) {
    float4 w = Frag::weights(unit, lane, j);
    if (!known) w.x = w.y = w.z = w.w = __int_as_float(0x7fc00000);
    const int64_t k = Frag::column(chunk, j, lane);
    if (p.K % 4 == 0 && k < p.K) {
      *reinterpret_cast<float4*>(to + k) = w;
    } else {
      const float values[4] = {w.x, w.y, w.z, w.w};
      for (int i = 0; i < 4; ++i)
        if (k + i < p.K) to[k + i] = values[i];
    }
  }
}

/// How many rows a team takes at a time, and how many warps a multiprocessor holds: as many rows as the registers
/// allow, since a row more costs no more reads of x.
template <class Frag, int kTokens>
struct RowsShape {
  static constexpr int kMostRows = Frag::kNeedsSums && !std::is_same_v<Frag, GroupedFrag8> ? 4
                                   : std::is_base_of_v<UnitColumns, Frag>                  ? 2
                                                                                           : 1;
  static constexpr int kRows = kTokens > 1 ? std::min(kMostRows, 2) : kMostRows;
  static constexpr int kWarps = kRows == 4 || kTokens > 1 ? 16 : 24;
};

/// The ways that leave the fewest lanes idle: teams take whole groups of rows, and warps whole chunks of them.
inline int best_ways(int64_t rows, int64_t chunks, int64_t rows_at_once, int64_t warps) {
  constexpr double kCost = 1.15;  // of a sum over twice as many warps, measured on an H100
  int best = 1;
  double least = 0, cost = 1;
  for (int ways = 1; ways <= kMostWays && ways <= chunks; ways *= 2, cost *= kCost) {
    const int64_t teams = warps / ways, of_team = (rows + teams - 1) / teams;
    const int64_t groups = (of_team + rows_at_once - 1) / rows_at_once, of_warp = (chunks + ways - 1) / ways;
    const double time = double(groups * of_warp) * cost;
    if (ways == 1 || time < least) best = ways, least = time;
  }
  return best;
}

/// p: all but first_chunk, chunks, accumulate and ways.
template <class Frag, int kTokens>
void launch_multiply_rows_of(const Device& device, Stream& stream, RowsParams p) {
  using Shape = RowsShape<Frag, kTokens>;
  constexpr int kBlockWarps = 8;
  static_assert(Shape::kWarps % kBlockWarps == 0 && kBlockWarps % kMostWays == 0);
  const auto kernel = multiply_rows<Frag, Shape::kRows, Shape::kWarps, kTokens>;
  int most_shared = 0;
  check_cuda(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.info().index));
  most_shared -= 2 * Shape::kWarps * Shape::kRows * kTokens * int(sizeof(float));
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared));

  const int chunks = int((int64_t(p.K) + 32 * Frag::kCols - 1) / (32 * Frag::kCols));
  const int at_once = std::max(1, int(most_shared / (kTokens * staged_bytes<Frag>(1))));
  for (p.first_chunk = 0; p.first_chunk < chunks; p.first_chunk += at_once) {
    p.chunks = std::min(at_once, chunks - p.first_chunk);
    p.accumulate = p.first_chunk > 0;
    const int64_t shared = kTokens * staged_bytes<Frag>(p.chunks);
    // Small blocks side by side, or one large one where x takes most of the shared memory.
    int warps = kBlockWarps, resident = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, warps * 32, size_t(shared)));
    if (resident * warps < Shape::kWarps / 2) warps = Shape::kWarps, resident = 1;
    const int64_t multiprocessors = device.info().multiprocessors;
    p.ways = best_ways(p.rows, p.chunks, Shape::kRows, multiprocessors * resident * warps);
    const int64_t groups = (p.rows + Shape::kRows - 1) / Shape::kRows, teams = warps / p.ways;  // of a block
    const int64_t blocks = std::min(multiprocessors * resident, (groups + teams - 1) / teams);
    launch_kernel(device, stream, kernel, {dim3(unsigned(blocks)), warps * 32, shared}, p);
  }
}

template <class Frag>
void launch_multiply_rows(const Device& device, Stream& stream, const RowsParams& p) {
  static_assert(kMostFewRows == 4);
  if (p.tokens == 1) return launch_multiply_rows_of<Frag, 1>(device, stream, p);
  if (p.tokens == 2) return launch_multiply_rows_of<Frag, 2>(device, stream, p);
  launch_multiply_rows_of<Frag, 4>(device, stream, p);
}

template <class Frag>
void launch_embed_rows(const Device& device, Stream& stream, RowsParams p, const int32_t* ids, int64_t M, float* out) {
  p.chunks = int((int64_t(p.K) + 32 * Frag::kCols - 1) / (32 * Frag::kCols));
  const dim3 blocks(unsigned(p.chunks + 3) / 4, unsigned(M));
  launch_kernel(device, stream, embed_rows<Frag>, {blocks, 128}, p, ids, out);
}

/// What a rows_*.cu file gives for each of its layouts.
struct RowsKernel {
  void (*multiply)(const Device&, Stream&, const RowsParams&);
  void (*embed)(const Device&, Stream&, RowsParams, const int32_t* ids, int64_t M, float* out);
};
template <class Frag>
inline constexpr RowsKernel kRowsKernel = {launch_multiply_rows<Frag>, launch_embed_rows<Frag>};
/// nullptr for layouts of other files.
const RowsKernel* float_rows_kernel(layout::Id id);
const RowsKernel* block_rows_kernel(layout::Id id);
const RowsKernel* superblock_rows_kernel(layout::Id id);
const RowsKernel* grouped_rows_kernel(layout::Id id);

}  // namespace lacuna::cuda
