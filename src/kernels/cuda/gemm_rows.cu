// src/kernels/cuda/gemm_rows.cu - operands of weights in row layouts. A warp takes a chunk of a row, as the row kernels
// do (rows_frag.cuh).
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows_frag.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kWarps = 8;

struct GemmRows {
  const std::byte* data;  // of the first row
  int64_t row_bytes;
  uint32_t plane[kMostPlanes];
  uint32_t K, group_factor;
  int rows, chunks, tiles_of_row;
  float* scale;
  std::byte* tiles;
};

__device__ __forceinline__ uint2 pack(float4 v, float f) {
  return make_uint2(pack_halves(v.x * f, v.y * f), pack_halves(v.z * f, v.w * f));
}

template <class Frag>
__global__ void __launch_bounds__(kWarps * 32) write_rows(const __grid_constant__ GemmRows p) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, n = int(blockIdx.y), chunk = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  if (chunk >= p.chunks) return;
  const auto unit = Frag::load(RowView{p.data + n * p.row_bytes, p.plane, p.K, p.group_factor}, chunk, lane);
  const float inverse = inverse_of(__ldg(p.scale + n));
#pragma unroll
  for (int j = 0; j < Frag::kCols / 4; j += 2) {
    const uint2 a = pack(Frag::weights(unit, lane, j), inverse), b = pack(Frag::weights(unit, lane, j + 1), inverse);
    const int64_t k = Frag::column(chunk, j, lane), then = Frag::column(chunk, j + 1, lane), end = p.tiles_of_row * 64;
    const auto place = [&](int64_t column) {
      return p.tiles + operand_place(n, column / 8, p.tiles_of_row) + column % 8 * 2;
    };
    if (then == k + 4 && k % 8 == 0) {
      if (k < end) *reinterpret_cast<uint4*>(place(k)) = make_uint4(a.x, a.y, b.x, b.y);
    } else {
      if (k < end) *reinterpret_cast<uint2*>(place(k)) = a;
      if (then < end) *reinterpret_cast<uint2*>(place(then)) = b;
    }
  }
}

template <class Frag>
__global__ void __launch_bounds__(kWarps * 32) find_scales(const __grid_constant__ GemmRows p) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, n = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  if (n >= p.rows) return;
  const RowView row{p.data + n * p.row_bytes, p.plane, p.K, p.group_factor};
  uint32_t largest = 0;
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const auto unit = Frag::load(row, chunk, lane);
#pragma unroll
    for (int j = 0; j < Frag::kCols / 4; ++j) {
      const float4 v = Frag::weights(unit, lane, j);
      for (const float value : {v.x, v.y, v.z, v.w}) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
    }
  }
  largest = __reduce_max_sync(~0u, largest);
  if (lane == 0) p.scale[n] = scale_of(largest);
}

struct Kernels {
  void (*write)(GemmRows);
  void (*scales)(GemmRows);
  int columns;  // of a chunk
};
template <class Frag>
constexpr Kernels kernels() {
  return {write_rows<Frag>, find_scales<Frag>, 32 * Frag::kCols};
}
Kernels kernels_of(const layout::Layout& layout) {
  switch (layout.id) {
    case layout::Id::f32:
      return kernels<FragF32>();
    case layout::Id::f16:
    case layout::Id::bm16:
      return kernels<FragF16>();
    case layout::Id::bf16:
      return kernels<FragBf16>();
    case layout::Id::q4_0:
      return kernels<FragQ4_0>();
    case layout::Id::q4_1:
      return kernels<FragQ4_1>();
    case layout::Id::q5_0:
      return kernels<FragQ5_0>();
    case layout::Id::q5_1:
      return kernels<FragQ5_1>();
    case layout::Id::q8_0:
      return kernels<FragQ8_0>();
    case layout::Id::q2_K:
      return kernels<FragQ2K>();
    case layout::Id::q3_K:
      return kernels<FragQ3K>();
    case layout::Id::q4_K:
      return kernels<FragQ4K>();
    case layout::Id::q5_K:
      return kernels<FragQ5K>();
    case layout::Id::q6_K:
      return kernels<FragQ6K>();
    case layout::Id::gq2:
      return kernels<GroupedFrag<2>>();
    case layout::Id::gq3:
      return kernels<GroupedFrag<3>>();
    case layout::Id::gq4:
    case layout::Id::nm24_q4:
      return kernels<GroupedFrag<4>>();
    case layout::Id::gq8:
      return kernels<GroupedFrag8>();
    case layout::Id::bm2:
      return kernels<MaskedFrag<GroupedFrag<2>>>();
    case layout::Id::bm3:
      return kernels<MaskedFrag<GroupedFrag<3>>>();
    case layout::Id::bm4:
      return kernels<MaskedFrag<GroupedFrag<4>>>();
    case layout::Id::bm8:
      return kernels<MaskedFrag<GroupedFrag8>>();
    default:
      throw Error("--device cuda: no kernel of several tokens reads {}", layout.name);
  }
}

GemmRows params_of(const Rows& weights, const Kernels& kernels, int64_t first, float* scale) {
  const RowPlaces places = row_places(*weights.layout, weights.K, weights.params);
  GemmRows p{};
  p.data = weights.data + first * places.row_bytes;
  p.row_bytes = places.row_bytes;
  p.group_factor = places.group_factor;
  for (int i = 0; i < kMostPlanes; ++i) p.plane[i] = uint32_t(places.plane[i]);
  p.K = uint32_t(weights.K);
  p.chunks = int((weights.K + kernels.columns - 1) / kernels.columns);
  p.tiles_of_row = int(tiles_of_row(weights.K));
  p.scale = scale;
  return p;
}

}  // namespace

void launch_weight_scales(const Device& device, Stream& stream, const Rows& weights, float* scale) {
  if (weights.N <= 0) return;
  const Kernels kernels = kernels_of(*weights.layout);
  GemmRows p = params_of(weights, kernels, 0, scale);
  p.rows = int(weights.N);
  launch_kernel(device, stream, kernels.scales, {dim3(unsigned((weights.N + kWarps - 1) / kWarps)), kWarps * 32}, p);
}

void launch_gemm_weights(const Device& device, Stream& stream, const Rows& weights, int64_t first, const Operand& to) {
  const Kernels kernels = kernels_of(*weights.layout);
  constexpr int64_t kMostBlocks = 65535;
  for (int64_t at = 0; at < to.rows; at += kMostBlocks / kTileRows * kTileRows) {
    GemmRows p = params_of(weights, kernels, first + at, to.scale + at);
    p.rows = int(std::min(to.rows - at, kMostBlocks / kTileRows * kTileRows));
    p.tiles = to.tiles + at / kTileRows * p.tiles_of_row * kTileBytes;
    const dim3 blocks(unsigned((p.chunks + kWarps - 1) / kWarps), unsigned(p.rows));
    launch_kernel(device, stream, kernels.write, {blocks, kWarps * 32}, p);
  }
}

}  // namespace lacuna::cuda
