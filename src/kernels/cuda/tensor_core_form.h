// src/kernels/cuda/tensor_core_form.h - f8, nm24_f8 and nm24_bf16 as tensor cores read them: values, metadata and
// scales in arrays of their own, padded to whole tiles.
//
// Sparse metadata (PTX ISA, "Sparse matrix storage" of mma.sp and of wgmma.mma_async.sp): 4 bits for every four columns
// of a row of A, the places of its two values, the lower one in the lower bits; 0, 5, 10 and 15 are undefined. Padding
// has the places 0 and 1 (4) and values of zero.
//
//   lanes    u32[rows / 16][cols / 64][32]: the metadata register of each lane of a warp that multiplies 16 rows by 64
//            columns; a warpgroup's warp w has row block 4 i + w. Lane 4 g + t of 8-bit values (one mma.sp.m16n8k64 or
//            a quarter of one wgmma.mma_async.sp with k64, all lanes count, selector 0): row g + 8 (t % 2), columns 32
//            (t / 2) + 0..31, low columns in low bits. Of 16-bit values (two steps of k32, of which step s is given the
//            selector s and counts lanes t / 2 = s): columns 32 (t / 2) + 16 (t % 2) + 0..15, of row g in the low half,
//            of row g + 8 in the high one.
//   cutlass  the tensor E of CUTLASS's sm_90 sparse collectives whose tile is `tile_cols` columns deep: atoms of 64
//   rows
//            and tile_cols columns, first along the rows, then along the columns. In an atom of 8-bit values rows lie
//            one after the other; of 16-bit values the strides, in columns, are column % 16: 1, row / 8 % 2: 16, column
//            / 32: 32, row % 8: S = tile_cols, column / 16 % 2: 8 S, row / 16 % 4: 16 S. 4 bits for four columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "layout/layout.h"

namespace lacuna::cuda {

enum class MetadataOrder : uint8_t { lanes, cutlass };

/// How far a form is padded, and how its metadata lies.
struct TensorCoreFormOptions {
  MetadataOrder order = MetadataOrder::lanes;
  int64_t tile_rows = 64;   // multiple of 64
  int64_t tile_cols = 128;  // multiple of 64
};

struct TensorCoreForm {
  TensorCoreFormOptions options;
  int64_t rows = 0, cols = 0;       // N and K, padded
  int64_t value_bytes = 0;          // 1: e4m3; 2: bf16
  std::vector<std::byte> values;    // [rows, cols or cols / 2]
  std::vector<std::byte> metadata;  // of 2:4 layouts: rows * cols / 8
  std::vector<float> scale;         // [rows], 1 past N; empty: bf16
};

/// bytes: sound (Layout::first_bad). Throws Error for a layout of another family and for tiles that are not as said.
TensorCoreForm make_tensor_core_form(const layout::Layout& layout, layout::Shape shape,
                                     std::span<const std::byte> bytes, const TensorCoreFormOptions& options,
                                     ThreadPool* pool = nullptr);

/// The inverse: the canonical bytes. Throws Error where the form is not that of such a matrix.
std::vector<std::byte> canonical_bytes(const layout::Layout& layout, layout::Shape shape, const TensorCoreForm& form);

}  // namespace lacuna::cuda
