// src/layout/bm.h - bm2, bm3, bm4, bm8, bm16: bitmask, one bit for each weight and a code for each kept one. Any
// sparsity, any pattern; dropped weights are exactly +0.
// W: [N, K], any N >= 1 and K >= 1. Codes have B bits, B as in the name. Parameters:
//   group_size g  (not bm16) inputs of a row that share scale and zero; 0, or anything from K up: the whole row.
//                 G = ceil(K / g) groups, the last may be shorter
//   octets        eight codes each, of the whole matrix; below 2^32
// and nnz, the kept weights, from the manifest. Sections, each beginning at the next multiple of 32 bytes, the gaps
// filled with zeros:
//   row_start u32[N + 1]        row n's codes are octets row_start[n] .. row_start[n + 1]; row_start[0] = 0
//   scale     f16[N, G]         weight = scale * (code - zero), the difference and the product in float
//   zero      f16[N, G]         (bm16 has neither scale nor zero)
//   mask      u8[N, ceil(K/8)]  bit k % 8 of byte k / 8: input k is kept; bits past K are zero
//   code      [octets] of B bytes: the codes of a row's kept weights in order of the inputs, as a string of bits, low
//             bits first (layout/octet.h), then codes 0 up to a whole octet. bm16: the weights themselves as f16
// 1 + B (1 - sparsity) + 32 / g bits a weight, and up to 7 codes a row of padding.
#pragma once

#include <cstdint>
#include <span>

#include "layout/layout.h"

namespace lacuna::layout {

/// Places of the sections in bytes from the beginning.
struct BitmaskMap {
  int bits = 0;
  int64_t groups = 0;    // of a row; bm16: 0
  int64_t mask_row = 0;  // bytes of a row's mask
  int64_t scale = 0, zero = 0, mask = 0, code = 0, end = 0;

  /// Throws Error for a shape or params that cannot be, and where sizes pass 2^63.
  BitmaskMap(const Layout& layout, Shape shape, Params params);
};

/// A row's octets. Throws Error naming the row unless they lie in the matrix and hold exactly the mask's kept weights.
struct BitmaskRow {
  const std::byte* mask;  // [mask_row]
  const std::byte* code;  // [octets] of B bytes
  int64_t kept, octets;
};
BitmaskRow bitmask_row(const BitmaskMap& map, Shape shape, Params params, std::span<const std::byte> bytes, int64_t n);

/// Layout::size, ::decode and ::first_bad of the bm layouts. decode_bitmask defines them; it throws Error where
/// bitmask_row does, so that no bytes can lead it outside of `bytes`.
int64_t bitmask_size(const Layout& layout, Shape shape, Params params);
void decode_bitmask(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, int64_t row0,
                    int64_t rows, float* out);
int64_t first_bad_bitmask_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes);

}  // namespace lacuna::layout
