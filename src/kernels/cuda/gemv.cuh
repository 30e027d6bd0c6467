// src/kernels/cuda/gemv.cuh - the GEMV over prepared zigzag columns, for any Frag. Memory bound: reads the codes and
// headers of the columns that count once.
//
// Lane l of a warp has outputs 8l to 8l + 7 of a superblock row. A chunk is up to kChunk columns: all of its loads come
// first. Each lane then takes one column's header (32 / kChunk lanes share a column, each has a part of its groups) and
// makes the factors x * scale of its groups, which go through shared memory to the lanes that have these outputs. They
// are f16, relative to the chunk's largest; codes are read as subnormal halves, so that a multiplication needs no
// conversion; eight columns are summed in f16, the rest in f32. x * min is summed apart, a lane's columns at a time,
// and brought to the outputs at the end. frag.cuh says what a Frag is.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/cuda/gemv.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/share.h"

namespace lacuna::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

/// GemvArgs as the kernel wants them.
struct GemvParams {
  const std::byte *codes, *headers;
  const float *x, *up, *norms;
  float threshold;
  const int32_t *list, *count;
  float *y, *zero;
  int K, segments, segment_columns;  // each segment but the last ones
  unsigned share_factor;             // of segments * warps
  unsigned zero_quads;               // of 4 floats
  Workspace workspace;
  unsigned early_codes, early_headers;  // bytes of a segment
  bool has_sibling, is_sibling;
};

/// Before inputs are read. A sibling's are there: the launch before lets it start after its own wait.
__device__ __forceinline__ void wait_for_inputs(const GemvParams& p) {
  if (!p.is_sibling) wait_for_predecessors();
  if (p.has_sibling) launch_dependents();
}

/// Input k.
__device__ __forceinline__ float input_of(const GemvParams& p, int k) {
  const float x = __ldcg(p.x + k);
  return p.up == nullptr ? x : silu(x) * __ldcg(p.up + k);
}

/// Asks for the first bytes of the block's segment, in L2.
__device__ __forceinline__ void fetch_early(const std::byte* from, unsigned bytes) {
  for (unsigned at = threadIdx.x * 128; at < bytes; at += blockDim.x * 128) prefetch_l2(from + at);
}

/// A block's active columns of [k0, k0 + n), ascending, with their inputs.
template <int kWarps>
struct Collected {
  uint16_t column[kSegmentColumns];  // from k0
  float x[kSegmentColumns];
  int counts[kWarps];

  /// All threads; returns how many there are. Each warp counts a stretch of the columns by ballots; the counts of the
  /// warps before say where it writes.
  __device__ __forceinline__ int collect(const GemvParams& p, int k0, int n) {
    constexpr int kRounds = kSegmentColumns / kWarps / kWarpSize;
    const int lane = int(threadIdx.x) % kWarpSize, w = int(threadIdx.x) / kWarpSize;
    const int stretch = (n + kWarps - 1) / kWarps, begin = w * stretch, end = min(n, begin + stretch);
    float values[kRounds];
    unsigned masks[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int k = begin + i * kWarpSize + lane;
      values[i] = k < end ? input_of(p, k0 + k) : 0.0f;
    }
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int k = begin + i * kWarpSize + lane;
      float size = fabsf(values[i]);
      if (p.norms != nullptr && k < end) size *= __ldg(p.norms + k0 + k);
      masks[i] = __ballot_sync(kAllLanes, k < end && !(size < p.threshold));
      mine += __popc(masks[i]);
    }
    if (lane == 0) counts[w] = mine;
    __syncthreads();
    int at = 0, all = 0;
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
      if (v < w) at += counts[v];
      all += counts[v];
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (masks[i] >> lane & 1) {
        const int to = at + __popc(masks[i] & ((1u << lane) - 1));
        column[to] = uint16_t(begin + i * kWarpSize + lane);
        x[to] = values[i];
      }
      at += __popc(masks[i]);
    }
    __syncthreads();
    return all;
  }
};

/// Each of kLanes lanes that follow each other (from a multiple of kLanes on) has sums over its columns of each of
/// kGroups groups; returns the sum over these lanes of one group: of lane l of them group l * kGroups / kLanes.
template <int kLanes, int kGroups>
__device__ __forceinline__ float sum_to_groups(float (&sums)[kGroups]) {
  const int lane = int(threadIdx.x) % kWarpSize;
  int step = kLanes / 2;
#pragma unroll
  for (int half = kGroups / 2; half >= 1; half /= 2, step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int g = 0; g < half; ++g) {
      const float keep = upper ? sums[g + half] : sums[g], send = upper ? sums[g] : sums[g + half];
      sums[g] = keep + __shfl_xor_sync(kAllLanes, send, step);
    }
  }
#pragma unroll
  for (; step >= 1; step /= 2) sums[0] += __shfl_xor_sync(kAllLanes, sums[0], step);
  return sums[0];
}

/// Sets the block's part of what a later launch adds to to zeros.
__device__ __forceinline__ void clear(const GemvParams& p) {
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x, threads = gridDim.x * gridDim.y * blockDim.x;
  for (unsigned i = block * blockDim.x + threadIdx.x; i < p.zero_quads; i += threads)
    reinterpret_cast<float4*>(p.zero)[i] = make_float4(0, 0, 0, 0);
}

/// Adds the block's sums to y, or, with a workspace, stores them: the block that comes last adds up those of its
/// superblock row in the order of the segments. v: of outputs 4t to 4t + 3, thread t < 64.
__device__ __forceinline__ void store_sums(const GemvParams& p, int r, int s, float4 v) {
  float* const y = p.y + size_t(r) * 256 + threadIdx.x * 4;
  if (p.workspace.partial == nullptr) {
    if (threadIdx.x < 64) reduce_add(y, v);
    return;
  }
  const size_t step = size_t(gridDim.y) * 256;  // from segment to segment
  float* const mine = p.workspace.partial + size_t(r) * 256 + threadIdx.x * 4;
  __shared__ bool last;
  if (threadIdx.x < 64) {
    *reinterpret_cast<float4*>(mine + s * step) = v;
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.workspace.arrived + r, 1u) == unsigned(p.segments - 1);
    if (last) p.workspace.arrived[r] = 0;
  }
  __syncthreads();
  if (!last || threadIdx.x >= 64) return;
  __threadfence();
  float4 sum = make_float4(0, 0, 0, 0);
  for (int i = 0; i < p.segments; ++i) {
    const float4 part = __ldcg(reinterpret_cast<const float4*>(mine + i * step));
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  *reinterpret_cast<float4*>(y) = sum;
}

template <class Frag, Inputs kInputs, int kWarps, int kChunk, int kResident>
__global__ void __launch_bounds__(kWarps* kWarpSize, kResident / kWarps) gemv(const GemvParams p) {
  constexpr int kRow = kChunk + 4;  // factors of a group; padded, so that groups begin in different banks
  constexpr int kSplit = kWarpSize / kChunk, kMine = Frag::kGroups / kSplit;  // lanes of a column, groups of each
  constexpr bool kCollects = kInputs == Inputs::threshold;
  struct Empty {};
  __shared__ __align__(16) uint32_t factor_table[kWarps][Frag::kGroups * kRow];
  __shared__ __align__(16) float sums_of_warps[kWarps][256];
  __shared__ std::conditional_t<kCollects, Collected<kWarps>, Empty> collected;

  const int lane = int(threadIdx.x) % kWarpSize, w = int(threadIdx.x) / kWarpSize;
  const int r = int(blockIdx.y), s = int(blockIdx.x);
  const int k0 = s * p.segment_columns, n = max(0, min(p.segment_columns, p.K - k0));
  const size_t first = size_t(r) * size_t(p.K) + (kInputs == Inputs::list ? 0 : size_t(k0));
  const std::byte* const codes = p.codes + first * Frag::kCodeBytes;
  const std::byte* const headers = p.headers + first * Frag::kHeaderBytes;

  if (!p.has_sibling) launch_dependents();
  int begin, end;  // this warp's share
  if constexpr (kInputs == Inputs::dense) {
    begin = n * w / kWarps, end = n * (w + 1) / kWarps;
  } else {
    // Memory has little to do until the kernels before have ended, and much of this will be read.
    const size_t skipped = kInputs == Inputs::list ? size_t(min(k0, p.K)) : 0;
    fetch_early(headers + skipped * Frag::kHeaderBytes, min(p.early_headers, unsigned(n) * Frag::kHeaderBytes));
    fetch_early(codes + skipped * Frag::kCodeBytes, min(p.early_codes, unsigned(n) * Frag::kCodeBytes));
    wait_for_inputs(p);
    if constexpr (kInputs == Inputs::list) {
      const unsigned count = unsigned(__ldcg(p.count)), i = unsigned(s * kWarps + w);
      const unsigned workers = unsigned(p.segments * kWarps);
      begin = int(share_begin(count, i, workers, p.share_factor));
      end = int(share_begin(count, i + 1, workers, p.share_factor));
    } else {
      const int count = collected.collect(p, k0, n);
      begin = count * w / kWarps, end = count * (w + 1) / kWarps;
    }
  }

  const int place = lane % kChunk, part = lane / kChunk;  // of this lane's column in a chunk; of the column's groups
  float sums[8] = {}, mins[kMine] = {};
  bool waited = kInputs != Inputs::dense;
#pragma unroll 1
  for (int c = begin; c < end; c += kChunk) {
    const int count = min(kChunk, end - c);
    const int i = place < count ? c + place : c;  // lanes without a column take the first one, times zero
    int column = i;
    if constexpr (kInputs == Inputs::list) column = __ldcg(p.list + i);
    if constexpr (kInputs == Inputs::threshold) column = collected.column[i];
    const typename Frag::Header header = Frag::load_header(headers, unsigned(column));
    typename Frag::Codes codes_of[kChunk];
    if constexpr (kInputs == Inputs::dense) {
      const std::byte* const from = codes + size_t(c) * Frag::kCodeBytes;
#pragma unroll
      for (int eight = 0; eight < kChunk / 8; ++eight) {
        if (8 * eight < count) {  // reads up to 7 columns more, times zero
#pragma unroll
          for (int j = 8 * eight; j < 8 * eight + 8; ++j)
            codes_of[j] = Frag::load_codes(from, size_t(j) * Frag::kCodeBytes, lane);
        }
      }
    } else {
      // Where each column begins goes to all lanes through shared memory; a shuffle for each would take longer.
      if (lane < kChunk) factor_table[w][lane] = unsigned(column) * Frag::kCodeBytes;
      __syncwarp();
      const uint4* const offsets = reinterpret_cast<const uint4*>(factor_table[w]);
#pragma unroll
      for (int eight = 0; eight < kChunk / 8; ++eight) {
        if (8 * eight < count) {
#pragma unroll
          for (int four = 2 * eight; four < 2 * eight + 2; ++four) {
            const uint4 at = offsets[four];
            codes_of[4 * four] = Frag::load_codes(codes, at.x, lane);
            codes_of[4 * four + 1] = Frag::load_codes(codes, at.y, lane);
            codes_of[4 * four + 2] = Frag::load_codes(codes, at.z, lane);
            codes_of[4 * four + 3] = Frag::load_codes(codes, at.w, lane);
          }
        }
      }
      __syncwarp();
    }
    if (!waited) {  // weights are no predecessor's result, x is
      wait_for_inputs(p);
      waited = true;
    }
    float x;
    if constexpr (kInputs == Inputs::threshold)
      x = collected.x[i];
    else
      x = input_of(p, (kInputs == Inputs::dense ? k0 : 0) + column);
    if (place >= count) x = 0;

    // norm makes the largest size 2^kTop to 2 * 2^kTop, back = 1 / norm; not a number and infinity stay what they are.
    const float size = Frag::magnitude(header, x);
    constexpr int kTop = Frag::kTop;
    const int exponent = int(__reduce_max_sync(kAllLanes, __float_as_uint(fabsf(size))) >> 23);
    const int clamped = min(max(exponent, kTop + 1), 229);
    const float norm = __uint_as_float(unsigned(254 + kTop - clamped) << 23);
    const float back = __uint_as_float(unsigned(clamped - kTop) << 23);
    __half2 factors[kMine / 2];
    Frag::template factors<kSplit>(header, part, x, size, norm, back, factors, mins);
    uint32_t* const to = &factor_table[w][part * kMine * kRow + place];
#pragma unroll
    for (int g = 0; g < kMine / 2; ++g) {
      const uint32_t pair = as_bits(factors[g]);
      to[2 * g * kRow] = __byte_perm(pair, pair, 0x1010);
      to[(2 * g + 1) * kRow] = __byte_perm(pair, pair, 0x3232);
    }
    __syncwarp();
    const uint4* const own = reinterpret_cast<const uint4*>(&factor_table[w][lane * Frag::kGroups / kWarpSize * kRow]);
#pragma unroll
    for (int eight = 0; eight < kChunk / 8; ++eight) {
      if (8 * eight >= count) break;
      __half2 part[4] = {};
#pragma unroll
      for (int four = 2 * eight; four < 2 * eight + 2; ++four) {
        const uint4 f = own[four];
        Frag::add(codes_of[4 * four], as_half2(f.x), part);
        Frag::add(codes_of[4 * four + 1], as_half2(f.y), part);
        Frag::add(codes_of[4 * four + 2], as_half2(f.z), part);
        Frag::add(codes_of[4 * four + 3], as_half2(f.w), part);
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float2 pair = __half22float2(part[q]);
        const float unit = back * Frag::unit(q);
        sums[q] = fmaf(pair.x, unit, sums[q]);
        sums[q + 4] = fmaf(pair.y, unit, sums[q + 4]);
      }
    }
    __syncwarp();
  }
  if (!waited) wait_for_inputs(p);

  float min_sum = 0;
  if constexpr (Frag::kHasMins) min_sum = sum_to_groups<kChunk>(mins);
  float4* const mine = reinterpret_cast<float4*>(&sums_of_warps[w][lane * 8]);
  mine[0] = make_float4(sums[0] - min_sum, sums[1] - min_sum, sums[2] - min_sum, sums[3] - min_sum);
  mine[1] = make_float4(sums[4] - min_sum, sums[5] - min_sum, sums[6] - min_sum, sums[7] - min_sum);
  clear(p);
  __syncthreads();
  float4 sum = make_float4(0, 0, 0, 0);
  if (threadIdx.x < 64) {
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
      const float4 part = *reinterpret_cast<const float4*>(&sums_of_warps[v][threadIdx.x * 4]);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
  }
  store_sums(p, r, s, sum);
  if (p.is_sibling) wait_for_predecessors();  // what follows waits for this launch alone
}

// ---- the kernels of a layout ----

/// One plan, `segments` left open, with its instances.
struct GemvKernel {
  GemvPlan plan;
  void (*by_inputs[3])(GemvParams);
};

template <class Frag, int kWarps, int kChunk, int kResident>
constexpr GemvKernel gemv_kernel() {
  return {
      {kWarps, kChunk, kResident, 0},
      {gemv<Frag, Inputs::dense, kWarps, kChunk, kResident>, gemv<Frag, Inputs::threshold, kWarps, kChunk, kResident>,
       gemv<Frag, Inputs::list, kWarps, kChunk, kResident>}};
}

/// What gemv.cu knows of a layout; one function a file, so that layouts compile at the same time.
struct GemvTable {
  layout::Id id;
  std::span<const GemvKernel> kernels;
};
GemvTable gemv_zz2_k();
GemvTable gemv_zz3_k();
GemvTable gemv_zz4_k();
GemvTable gemv_zz5_k();
GemvTable gemv_zz6_k();
GemvTable gemv_zz8();

}  // namespace lacuna::cuda
