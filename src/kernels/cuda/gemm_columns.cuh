// src/kernels/cuda/gemm_columns.cuh - operands of prepared zigzag columns (prepared.h), for any layout. For
// gemm_columns_layouts.cu.
//
// A block has one superblock row (256 outputs) and a range of its columns, 64 at a time. While these become f16 the
// codes and headers of the next ones come to shared memory. A thread has 8 outputs, those of a lane of the GEMV, and 8
// columns: eight pieces of the operand. Neighbours have neighbouring pieces, so that whole lines are written.
//
// Frag: kCodeBytes, kHeaderBytes, kGroups (of outputs that share a scale), and, both in shared memory,
//   ColumnScale scale(const std::byte* header, int group);   what a weight of the group is computed with
//   Codes codes(const std::byte* column, int lane);          outputs 8 lane to 8 lane + 7
//   float weight(Codes, int i, ColumnScale);                 output i of them; zero where the scale is {0, 0}
#pragma once

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"

namespace lacuna::cuda {

struct ColumnScale {
  float scale, offset;
};

struct GemmColumns {
  const std::byte *codes, *headers;  // of the first superblock row
  float* scale;                      // of its outputs; of launch_weight_scales: the bits of the largest magnitudes
  std::byte* tiles;
  int K, tiles_of_row, tiles_of_block;
};

/// What a block keeps of 64 columns.
template <class Frag>
struct StagedColumns {
  static constexpr int kEight = 8 * Frag::kCodeBytes + 16;  // bytes of eight columns, padded against bank conflicts
  __align__(16) std::byte codes[kTileColumns / 8 * kEight];
  __align__(16) std::byte headers[kTileColumns * Frag::kHeaderBytes];

  /// All threads: columns [k0, k0 + 64) of the superblock row that begins with column `first`.
  __device__ __forceinline__ void load(const GemmColumns& p, int64_t first, int k0) {
    static_assert(Frag::kCodeBytes % 16 == 0 && Frag::kHeaderBytes % 4 == 0);
    const int columns = min(kTileColumns, p.K - k0);
    const std::byte* const from = p.codes + (first + k0) * Frag::kCodeBytes;
    for (int at = int(threadIdx.x) * 16; at < columns * Frag::kCodeBytes; at += 256 * 16)
      copy_async(codes + at + at / (8 * Frag::kCodeBytes) * 16, from + at);
    const std::byte* const header = p.headers + (first + k0) * Frag::kHeaderBytes;
    for (int at = int(threadIdx.x) * 4; at < columns * Frag::kHeaderBytes; at += 256 * 4)
      copy_word_async(headers + at, header + at);
  }
};

/// kLargest: no operand is written; scale becomes the largest magnitudes.
template <class Frag, bool kLargest>
__global__ void __launch_bounds__(256, 3) write_columns(const __grid_constant__ GemmColumns p) {
  constexpr int kPieces = kTileColumns / 8, kScales = kTileColumns + kTileColumns / 8;  // of a group, padded
  __shared__ StagedColumns<Frag> staged[2];
  __shared__ ColumnScale scales[Frag::kGroups][kScales];
  launch_dependents();
  wait_for_predecessors();
  const int64_t first = int64_t(blockIdx.y) * p.K;
  const int begin = int(blockIdx.x) * p.tiles_of_block, end = min(begin + p.tiles_of_block, p.tiles_of_row);
  const int piece = int(threadIdx.x) % kPieces, lane = int(threadIdx.x) / kPieces;
  const ColumnScale* const own = scales[lane * Frag::kGroups / 32] + 9 * piece;
  float* const scale = p.scale + int64_t(blockIdx.y) * 256 + 8 * lane;
  // Row 8 lane + i of a tile has its piece at place piece ^ i (Operand).
  std::byte* to = p.tiles + operand_place(int64_t(blockIdx.y) * 256 + 8 * lane, begin * kPieces, p.tiles_of_row);
  staged[0].load(p, first, begin * kTileColumns);
  commit_copies();
  for (int t = begin; t < end; ++t, to += kTileBytes) {
    const StagedColumns<Frag>& now = staged[(t - begin) % 2];
    wait_for_copies<0>();
    __syncthreads();  // the columns are here, and nobody reads the ones before
    if (t + 1 < end) staged[(t + 1 - begin) % 2].load(p, first, (t + 1) * kTileColumns);
    commit_copies();
    const int columns = min(kTileColumns, p.K - t * kTileColumns);
    for (int i = int(threadIdx.x); i < kTileColumns * Frag::kGroups; i += 256) {
      const int column = i / Frag::kGroups, group = i % Frag::kGroups;
      ColumnScale of = {0, 0};
      if (column < columns) of = Frag::scale(now.headers + column * Frag::kHeaderBytes, group);
      scales[group][column + column / 8] = of;
    }
    __syncthreads();

    typename Frag::Codes column[8];
    ColumnScale of_column[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      column[j] = Frag::codes(now.codes + piece * now.kEight + j * Frag::kCodeBytes, lane);
      of_column[j] = own[j];
    }
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
        *reinterpret_cast<uint4*>(to + i * kTileRowBytes + ((piece ^ i) << 4)) =
            make_uint4(pack_halves(v[0] * f, v[1] * f), pack_halves(v[2] * f, v[3] * f),
                       pack_halves(v[4] * f, v[5] * f), pack_halves(v[6] * f, v[7] * f));
      }
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
