// src/kernels/cuda/gemv_few.cu - the GEMV of gemv.cuh for a few tokens at once: a chunk's codes are read once and
// multiplied with the factors of each token.
#include <algorithm>
#include <cstdint>

#include "core/error.h"
#include "kernels/cuda/frag_zz2_k.cuh"
#include "kernels/cuda/frag_zz3_k.cuh"
#include "kernels/cuda/frag_zz4_k.cuh"
#include "kernels/cuda/frag_zz5_k.cuh"
#include "kernels/cuda/frag_zz6_k.cuh"
#include "kernels/cuda/frag_zz8.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/launch.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kFewWarps = 4, kFewChunk = 16, kFewResident = 16;  // as in GemvPlan
constexpr int64_t kMostRows = 65535;

/// GemvFewArgs as the kernel wants them.
struct GemvFewParams {
  const std::byte *codes, *headers;
  const float* x;
  float* y;
  int64_t x_stride, y_stride;
  int tokens, K, segments, segment_columns;
  Workspace workspace;
};

/// Adds the block's sums to y, or, with a workspace, stores them: the block that comes last of a superblock row adds up
/// those of all segments in their order. sum_of(m, quad): of outputs 4 quad to 4 quad + 3 of token m.
template <class Sum>
__device__ __forceinline__ void store_few_sums(const GemvFewParams& p, int r, int s, const Sum& sum_of) {
  const size_t rows = size_t(gridDim.y) * 256;
  const auto y_of = [&](int m, int quad) { return p.y + m * p.y_stride + size_t(r) * 256 + 4 * quad; };
  if (p.workspace.partial == nullptr) {
    for (int i = int(threadIdx.x); i < p.tokens * 64; i += kFewWarps * kWarpSize)
      reduce_add(y_of(i / 64, i % 64), sum_of(i / 64, i % 64));
    return;
  }
  const auto part_of = [&](int m, int segment, int quad) {
    return p.workspace.partial + (size_t(m) * p.segments + segment) * rows + size_t(r) * 256 + 4 * quad;
  };
  __shared__ bool last;
  for (int i = int(threadIdx.x); i < p.tokens * 64; i += kFewWarps * kWarpSize)
    *reinterpret_cast<float4*>(part_of(i / 64, s, i % 64)) = sum_of(i / 64, i % 64);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.workspace.arrived + r, 1u) == unsigned(p.segments - 1);
    if (last) p.workspace.arrived[r] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = int(threadIdx.x); i < p.tokens * 64; i += kFewWarps * kWarpSize) {
    const int m = i / 64, quad = i % 64;
    float4 sum = make_float4(0, 0, 0, 0);
    if (p.workspace.start != nullptr)
      sum = __ldg(reinterpret_cast<const float4*>(p.workspace.start + size_t(r) * 256 + 4 * quad));
    for (int segment = 0; segment < p.segments; ++segment) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(part_of(m, segment, quad)));
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    *reinterpret_cast<float4*>(y_of(m, quad)) = sum;
  }
}

/// kTokens: as many as p.tokens or more.
template <class Frag, int kTokens>
__global__ void __launch_bounds__(kFewWarps* kWarpSize, kFewResident / kFewWarps)
    gemv_few(const __grid_constant__ GemvFewParams p) {
  constexpr int kRow = kFewChunk + 4, kTable = Frag::kGroups * kRow;  // as in gemv()
  constexpr int kSplit = kWarpSize / kFewChunk, kMine = Frag::kGroups / kSplit;
  __shared__ __align__(16) uint32_t factor_table[kFewWarps][kTokens][kTable];
  __shared__ __align__(16) float sums_of_warps[kFewWarps][kTokens][256];

  const int lane = int(threadIdx.x) % kWarpSize, w = int(threadIdx.x) / kWarpSize;
  const int r = int(blockIdx.y), s = int(blockIdx.x);
  const int k0 = s * p.segment_columns, n = max(0, min(p.segment_columns, p.K - k0));
  const size_t first = size_t(r) * size_t(p.K) + size_t(k0);
  const std::byte* const codes = p.codes + first * Frag::kCodeBytes;
  const std::byte* const headers = p.headers + first * Frag::kHeaderBytes;
  const int begin = n * w / kFewWarps, end = n * (w + 1) / kFewWarps;  // this warp's share
  const int place = lane % kFewChunk, part = lane / kFewChunk;

  launch_dependents();
  float sums[kTokens][8] = {}, mins[kTokens][kMine] = {};
  bool waited = false;
#pragma unroll 1
  for (int c = begin; c < end; c += kFewChunk) {
    const int count = min(kFewChunk, end - c);
    const int column = place < count ? c + place : c;  // lanes without a column take the first one, times zero
    const typename Frag::Header header = Frag::load_header(headers, unsigned(column));
    typename Frag::Codes codes_of[kFewChunk];
    const std::byte* const from = codes + size_t(c) * Frag::kCodeBytes;
#pragma unroll
    for (int eight = 0; eight < kFewChunk / 8; ++eight) {
      if (8 * eight < count) {  // reads up to 7 columns more, times zero
#pragma unroll
        for (int j = 8 * eight; j < 8 * eight + 8; ++j)
          codes_of[j] = Frag::load_codes(from, size_t(j) * Frag::kCodeBytes, lane);
      }
    }
    if (!waited) {  // weights are no predecessor's result, x is
      wait_for_predecessors();
      waited = true;
    }
    float back[kTokens];
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      const float x = m < p.tokens && place < count ? __ldcg(p.x + m * p.x_stride + k0 + column) : 0.0f;
      const float size = Frag::magnitude(header, x);
      constexpr int kTop = Frag::kTop;
      const int exponent = int(__reduce_max_sync(kAllLanes, __float_as_uint(fabsf(size))) >> 23);
      const int clamped = min(max(exponent, kTop + 1), 229);
      const float norm = __uint_as_float(unsigned(254 + kTop - clamped) << 23);
      back[m] = __uint_as_float(unsigned(clamped - kTop) << 23);
      __half2 factors[kMine / 2];
      Frag::template factors<kSplit>(header, part, x, size, norm, back[m], factors, mins[m]);
      uint32_t* const to = &factor_table[w][m][part * kMine * kRow + place];
#pragma unroll
      for (int g = 0; g < kMine / 2; ++g) {
        const uint32_t pair = as_bits(factors[g]);
        to[2 * g * kRow] = __byte_perm(pair, pair, 0x1010);
        to[(2 * g + 1) * kRow] = __byte_perm(pair, pair, 0x3232);
      }
    }
    __syncwarp();
#pragma unroll
    for (int eight = 0; eight < kFewChunk / 8; ++eight) {
      if (8 * eight >= count) break;
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        const uint4* const own =
            reinterpret_cast<const uint4*>(&factor_table[w][m][lane * Frag::kGroups / kWarpSize * kRow]);
        __half2 of_eight[4] = {};
#pragma unroll
        for (int four = 2 * eight; four < 2 * eight + 2; ++four) {
          const uint4 f = own[four];
          Frag::add(codes_of[4 * four], as_half2(f.x), of_eight);
          Frag::add(codes_of[4 * four + 1], as_half2(f.y), of_eight);
          Frag::add(codes_of[4 * four + 2], as_half2(f.z), of_eight);
          Frag::add(codes_of[4 * four + 3], as_half2(f.w), of_eight);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float2 pair = __half22float2(of_eight[q]);
          const float unit = back[m] * Frag::unit(q);
          sums[m][q] = fmaf(pair.x, unit, sums[m][q]);
          sums[m][q + 4] = fmaf(pair.y, unit, sums[m][q + 4]);
        }
      }
    }
    __syncwarp();
  }
  if (!waited) wait_for_predecessors();

#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    float min_sum = 0;
    if constexpr (Frag::kHasMins) min_sum = sum_to_groups<kFewChunk>(mins[m]);
    float4* const mine = reinterpret_cast<float4*>(&sums_of_warps[w][m][lane * 8]);
    const float* const v = sums[m];
    mine[0] = make_float4(v[0] - min_sum, v[1] - min_sum, v[2] - min_sum, v[3] - min_sum);
    mine[1] = make_float4(v[4] - min_sum, v[5] - min_sum, v[6] - min_sum, v[7] - min_sum);
  }
  __syncthreads();
  store_few_sums(p, r, s, [&](int m, int quad) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int v = 0; v < kFewWarps; ++v) {
      const float4 of = *reinterpret_cast<const float4*>(&sums_of_warps[v][m][4 * quad]);
      sum.x += of.x, sum.y += of.y, sum.z += of.z, sum.w += of.w;
    }
    return sum;
  });
}

/// Of up to two tokens, and of up to four.
struct FewKernels {
  void (*two)(GemvFewParams);
  void (*four)(GemvFewParams);
};
template <class Frag>
constexpr FewKernels few_kernels() {
  return {gemv_few<Frag, 2>, gemv_few<Frag, 4>};
}
FewKernels few_kernels_of(const layout::Layout& layout) {
  switch (layout.id) {
    case layout::Id::zz2_k:
      return few_kernels<FragZz2K>();
    case layout::Id::zz3_k:
      return few_kernels<FragZz3K>();
    case layout::Id::zz4_k:
      return few_kernels<FragZz4K>();
    case layout::Id::zz5_k:
      return few_kernels<FragZz5K>();
    case layout::Id::zz6_k:
      return few_kernels<FragZz6K>();
    case layout::Id::zz8:
      return few_kernels<FragZz8>();
    default:
      throw Error("no CUDA kernel of few tokens reads {}", layout.name);
  }
}

}  // namespace

int few_segments(const DeviceInfo& device, const Columns& weights) {
  const int64_t blocks = int64_t{device.multiprocessors} * kFewResident / kFewWarps;
  const int64_t most = std::clamp<int64_t>(weights.K / (kFewChunk * kFewWarps), 1, kMostSegments);
  return int(std::clamp<int64_t>(blocks / std::max<int64_t>(1, weights.rows), 1, most));
}

void launch_gemv_few(const Device& device, Stream& stream, const layout::Layout& layout, const GemvFewArgs& args) {
  const FewKernels kernels = few_kernels_of(layout);
  if (args.M <= 0 || args.weights.rows == 0) return;
  if (args.M > kMostFewColumns)
    throw Error("--device cuda: {} tokens; the kernels of few tokens take at most {}", args.M, kMostFewColumns);
  if (args.weights.rows > kMostRows)
    throw Error("{} superblock rows; the CUDA kernels take at most {}", args.weights.rows, kMostRows);
  GemvFewParams p{};
  p.codes = args.weights.codes, p.headers = args.weights.headers;
  p.x = args.x, p.x_stride = args.x_stride;
  p.y = args.y, p.y_stride = args.y_stride;
  p.tokens = int(args.M), p.K = int(args.weights.K);
  p.segments = few_segments(device.info(), args.weights);
  p.segment_columns = (p.K + p.segments - 1) / p.segments;
  p.workspace = args.workspace;
  static_assert(kMostFewColumns == 4);
  launch_kernel(device, stream, args.M <= 2 ? kernels.two : kernels.four,
                {dim3(unsigned(p.segments), unsigned(args.weights.rows)), kFewWarps * kWarpSize}, p);
}

}  // namespace lacuna::cuda
