// src/kernels/cuda/gemm_columns.cuh - operands of prepared zigzag columns (prepared.h), for any layout. For
// gemm_columns_layouts.cu.
//
// A block has one superblock row (256 outputs) and 64 columns, whose codes and scales go through shared memory. A
// thread has 8 outputs, those of a lane of the GEMV, and 8 columns: eight pieces of the operand. Neighbours have
// neighbouring pieces, so that whole lines are written.
//
// Frag: kCodeBytes, kHeaderBytes, kGroups (of outputs that share a scale), and
//   Scale scale(const std::byte* header, int group);                what a weight of the group is computed with
//   Codes codes(const std::byte* column, int lane);                 outputs 8 lane to 8 lane + 7
//   float weight(Codes, int i, Scale);                              output i of them; zero where the scale is {0, 0}
#pragma once

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"

namespace lacuna::cuda {

struct ColumnScale {
  float scale, offset;
};

struct GemmColumns {
  const std::byte *codes, *headers;  // of the first superblock row
  float* scale;                      // of its outputs; of launch_weight_scales: the bits of the largest magnitudes
  std::byte* tiles;
  int K, tiles_of_row;
};

/// kLargest: no operand is written; scale becomes the largest magnitudes.
template <class Frag, bool kLargest>
__global__ void __launch_bounds__(256, 4) write_columns(const __grid_constant__ GemmColumns p) {
  constexpr int kColumns = kTileColumns, kPieces = kColumns / 8;
  constexpr int kEight = 8 * Frag::kCodeBytes + 16;  // bytes of eight columns, padded against bank conflicts
  constexpr int kScales = kColumns + kColumns / 8;   // of a group, padded
  static_assert(Frag::kCodeBytes % 16 == 0 && Frag::kHeaderBytes % 4 == 0);
  __shared__ __align__(16) std::byte codes[kPieces * kEight];
  __shared__ ColumnScale scales[Frag::kGroups][kScales];
  launch_dependents();
  wait_for_predecessors();
  const int k0 = int(blockIdx.x) * kColumns, columns = min(kColumns, p.K - k0);
  const int64_t first = int64_t(blockIdx.y) * p.K + k0;
  const std::byte* const from = p.codes + first * Frag::kCodeBytes;
  for (int at = int(threadIdx.x) * 16; at < columns * Frag::kCodeBytes; at += 256 * 16)
    *reinterpret_cast<uint4*>(codes + at + at / (8 * Frag::kCodeBytes) * 16) =
        load_stream(reinterpret_cast<const uint4*>(from + at));
  for (int i = int(threadIdx.x); i < kColumns * Frag::kGroups; i += 256) {
    const int column = i / Frag::kGroups, group = i % Frag::kGroups;
    ColumnScale scale = {0, 0};
    if (column < columns) scale = Frag::scale(p.headers + (first + column) * Frag::kHeaderBytes, group);
    scales[group][column + column / 8] = scale;
  }
  __syncthreads();

  const int piece = int(threadIdx.x) % kPieces, lane = int(threadIdx.x) / kPieces;
  const ColumnScale* const own = scales[lane * Frag::kGroups / 32] + 9 * piece;
  float* const scale = p.scale + int64_t(blockIdx.y) * 256 + 8 * lane;
  typename Frag::Codes column[8];
  ColumnScale of_column[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    column[j] = Frag::codes(codes + piece * kEight + j * Frag::kCodeBytes, lane);
    of_column[j] = own[j];
  }
  const int64_t row = int64_t(blockIdx.y) * 256 + 8 * lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = Frag::weight(column[j], i, of_column[j]);
    if constexpr (kLargest) {
      uint32_t largest = 0;
#pragma unroll
      for (const float value : v) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
#pragma unroll
      for (int step = 1; step < kPieces; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
      if (piece == 0) atomicMax(reinterpret_cast<unsigned*>(scale + i), largest);
    } else {
      const float f = inverse_of(__ldg(scale + i));
      const int64_t place = operand_place(row + i, int64_t(blockIdx.x) * kPieces + piece, p.tiles_of_row);
      *reinterpret_cast<uint4*>(p.tiles + place) =
          make_uint4(pack_halves(v[0] * f, v[1] * f), pack_halves(v[2] * f, v[3] * f), pack_halves(v[4] * f, v[5] * f),
                     pack_halves(v[6] * f, v[7] * f));
    }
  }
}

struct GemmColumnsKernel {
  int64_t code_bytes, header_bytes;
  void (*write)(GemmColumns);
  void (*largest)(GemmColumns);
};
template <class Frag>
inline constexpr GemmColumnsKernel kGemmColumnsKernel = {Frag::kCodeBytes, Frag::kHeaderBytes,
                                                         write_columns<Frag, false>, write_columns<Frag, true>};
/// nullptr for layouts without one.
const GemmColumnsKernel* gemm_columns_kernel(layout::Id id);

}  // namespace lacuna::cuda
