// src/kernels/cuda/gemm_groups.cuh - operands (gemm.h) of group-sparse weights (groups_form.h, units_form.h): zeros
// first, then what is kept. A warp takes a chunk or a record.
#pragma once

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/groups.cuh"
#include "kernels/cuda/units.cuh"

namespace lacuna::cuda {

inline constexpr int kGemmGroupWarps = 8;

struct GemmGroups {
  const std::byte* chunks;
  const uint32_t* start;  // of the first panel
  const Quad* quads;      // of units
  int rows, K, tiles_of_row;
  const float* scale;  // [rows]
  std::byte* tiles;
  int64_t zero_quads;  // 16 bytes, of the operand
};

__global__ void __launch_bounds__(512) clear_operand(const __grid_constant__ GemmGroups p) {
  launch_dependents();
  wait_for_predecessors();
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.zero_quads;
       i += int64_t(gridDim.x) * blockDim.x)
    reinterpret_cast<uint4*>(p.tiles)[i] = make_uint4(0, 0, 0, 0);
}

template <int kBits, int kGroup>
__global__ void __launch_bounds__(kGemmGroupWarps * 32) write_groups(const __grid_constant__ GemmGroups p) {
  using Chunk = GroupChunk<kBits, kGroup>;
  constexpr GroupForm kForm = Chunk::kForm;
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, panel = int(blockIdx.y);
  const uint32_t end = __ldg(p.start + panel + 1), step = gridDim.x * kGemmGroupWarps;
  for (uint32_t c = __ldg(p.start + panel) + blockIdx.x * kGemmGroupWarps + uint32_t(warp); c < end; c += step) {
    const std::byte* const chunk = p.chunks + size_t(c) * kForm.bytes;
    const GroupTail tail = Chunk::load_tail(chunk, lane);
#pragma unroll 1
    for (int piece = 0; piece < kForm.pieces; ++piece) {
      typename Chunk::Words words;
      Chunk::load(chunk, piece, lane, words);
#pragma unroll
      for (int q = 0; q < kChunkTiles; ++q) {
        // A lane has two inputs of slots lane / 4 and lane / 4 + 8 of each tile; what they share is another lane's.
        const int of = lane / 4 * 4 + q % 4;
        const uint32_t scales = __shfl_sync(~0u, q < 4 ? tail.scale.x : tail.scale.y, of);
        const uint32_t rows = __shfl_sync(~0u, tail.row, of), zeros = __shfl_sync(~0u, tail.zero, of);
        const uint32_t places = __shfl_sync(~0u, q < 4 ? tail.places.x : tail.places.y, of);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int e = q / 4 * 2 + half, n = panel * kPanelRows + int(rows >> (8 * e) & 0xffu);
          const float2 of_scale = __half22float2(as_half2(scales));
          const float scale = half == 0 ? of_scale.x : of_scale.y;
          // Slots without a group have scale 0 (values 0): they must not write zeros where another slot writes.
          const int place = place_of(places, lane / 4 + 8 * half);
#pragma unroll
          for (int s = 0; s < kForm.half; ++s) {
            const int of_piece = q * kForm.half + s;
            const uint2 halves = Chunk::halves(words, of_piece);
            const uint32_t bits = half == 0 ? halves.x : halves.y;
            float2 w = __half22float2(as_half2(bits));
            if constexpr (kForm.coded) {
              constexpr uint32_t kCode = (1u << kForm.width) - 1;
              const int up = kForm.width * (of_piece % kForm.positions);
              const float zero = float(zeros >> (kForm.width * e) & kCode);
              w = make_float2(scale * (float(bits >> up & kCode) - zero),
                              scale * (float(bits >> (up + 16) & kCode) - zero));
            }
            const bool written = n < p.rows && (kForm.coded ? scale != 0 : bits != 0);
            if (!written) continue;
            const int k = (place * (kGroup / 8) + piece * kForm.half + s) * 8 + lane % 4 * 2;
            if (k >= p.K) continue;  // the last group may be shorter
            if (k + 1 >= p.K) w.y = 0;
            const float inverse = inverse_of(__ldg(p.scale + n));
            *reinterpret_cast<uint32_t*>(p.tiles + operand_place(n, k / 8, p.tiles_of_row) + lane % 4 * 4) =
                pack_halves(w.x * inverse, w.y * inverse);
          }
        }
      }
    }
  }
}

/// The same of units. A warp takes a record.
template <int kBits>
__global__ void __launch_bounds__(kGemmGroupWarps * 32) write_units(const __grid_constant__ GemmGroups p) {
  using Units = LaneUnits<kBits>;
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, panel = int(blockIdx.y);
  const uint32_t begin = __ldg(&p.quads[__ldg(p.start + panel)].first);
  const uint32_t end = __ldg(&p.quads[__ldg(p.start + panel + 1) - 1].end), step = gridDim.x * kGemmGroupWarps;
  for (uint32_t c = begin + blockIdx.x * kGemmGroupWarps + uint32_t(warp); c < end; c += step) {
    Units units;
    units.load(p.chunks + size_t(c) * Units::kForm.bytes, lane);
    const int n = panel * kPanelRows + int(units.output % kPanelRows);
    if (n >= p.rows) continue;
    const float inverse = inverse_of(__ldg(p.scale + n));
#pragma unroll
    for (int unit = 0; unit < kLaneUnits; ++unit) {
      const uint32_t index = unit == 0 ? units.index & 0xffffu : units.index >> 16;
      const int place = int(index & 0xfffu);
      const float zero = float(index >> 12);
      const float2 scales = __half22float2(as_half2(units.scale));
      const float scale = unit == 0 ? scales.x : scales.y;
      if (place * kUnit >= p.K) continue;  // a unit of no inputs
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const uint32_t codes = units.bytes(unit, half * 2 + i / 4) >> (8 * (i % 4));
          const int k = place * kUnit + half * 8 + i;
          const float a = k < p.K ? scale * (float(codes & 0xffu) - zero) : 0.0f;
          const float b = k + 1 < p.K ? scale * (float(codes >> 8 & 0xffu) - zero) : 0.0f;
          pairs[i / 2] = pack_halves(a * inverse, b * inverse);
        }
        if (place * kUnit + half * 8 < p.K)
          *reinterpret_cast<uint4*>(p.tiles + operand_place(n, place * 2 + half, p.tiles_of_row)) =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

}  // namespace lacuna::cuda
