// src/layout/tensor_core.h - f8, nm24_f8, nm24_bf16: rows of values that FP8 and 2:4 tensor cores read.
// W: [N, K] row-major, any K. Rows lie one after the other, little-endian, without padding:
//
//   f8         scale f32, code e4m3[K]: weight = scale * code (core/e4m3.h)
//   nm24_f8    scale f32, index u8[(G + 1) / 2], code e4m3[2 G]
//   nm24_bf16  index u8[(G + 1) / 2], value bf16[2 G]
//
// G = (K + 3) / 4 groups of four consecutive inputs, of which two are kept: those whose places 0..3 in the group a
// group's 4 bits of `index` hold, the lower place in the lower 2 bits; a byte holds two groups, the first in its low
// bits. Codes lie in the order of their inputs. Dropped weights are +0. Inputs past K count as zeros, which the last
// group keeps (as +0) where it has less than two weights.
//
// A row's scale is e4m3_scale of its largest |weight| before any is dropped, so that a row has the same codes in f8 and
// nm24_f8 whatever the mask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/thread_pool.h"
#include "layout/layout.h"

namespace lacuna::layout {

/// Where things lie in a row, in bytes from its beginning.
struct TensorCoreRow {
  bool sparse = false, scaled = false;
  int64_t groups = 0, kept = 0;  // kept: values of a row; the dense layout's K
  int64_t index = 0, values = 0, bytes = 0;
};

/// For any K >= 0 of a layout of this family. Throws Error where the size overflows.
TensorCoreRow tensor_core_row(const Layout& layout, int64_t K);

/// Encodes a matrix, rounded to nearest even. w: [N, K] finite; keep: [N, K], 0: dropped, empty for f8; out: as many
/// bytes as the layout's size. Rows are shared out over the pool's workers where there is one. Throws Error naming the
/// row and the group of four that does not keep what it has to (two_of_four.h).
void encode_tensor_core(const Layout& layout, Shape shape, std::span<const float> w, std::span<const uint8_t> keep,
                        std::span<std::byte> out, ThreadPool* pool = nullptr);

/// What the bytes of a row hold beside its places: the scale (1 of nm24_bf16), and the kept values as stored, codes not
/// multiplied with the scale. values: [TensorCoreRow::kept]; places: the same, 0..3; empty: not asked for.
float read_tensor_core_row(const Layout& layout, int64_t K, std::span<const std::byte> row, std::span<float> values,
                           std::span<uint8_t> places);

/// Which weights of a matrix in a 2:4 layout are kept. keep: [K] of one row.
void read_keep(const Layout& layout, int64_t K, std::span<const std::byte> row, std::span<uint8_t> keep);

// Of the layout table.
int64_t tensor_core_size(const Layout& layout, Shape shape, Params params);
void decode_tensor_core(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                        int64_t row0, int64_t rows, float* out);
int64_t first_bad_tensor_core_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes);
int64_t tensor_core_kept_weights(const Layout& layout, Shape shape);

}  // namespace lacuna::layout
