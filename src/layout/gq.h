// src/layout/gq.h - gq2, gq3, gq4, gq8: grouped rows, the home of what RTN, GPTQ, AWQ and AWP return.
// W: [N, K], any N >= 1 and K >= 1. Parameter group_size g: inputs of a row that share scale and zero; 0, or anything
// from K up: the whole row. G = ceil(K / g) groups, the last may be shorter. Codes have B bits, B as in the name.
// A row:
//   scale f16[G]   weight = scale * (code - zero), code in 0 .. 2^B - 1; the difference and the product in float
//   zero  f16[G]   finite; it may lie between two codes or outside them
//   code  K codes of B bits as a string of bits, low bits first (layout/octet.h)
//   zero bits up to an even number of bytes
// 4 G + 2 ceil(K B / 16) bytes; rows follow each other without padding.
#pragma once

#include <cstdint>
#include <span>

#include "layout/layout.h"

namespace lacuna::layout {

/// Bytes of a row, or -1 where they pass 2^63.
int64_t gq_row_bytes(int bits, int64_t K, int64_t group_size);

/// Encodes one row. code: [K], scale, zero: [G], finite values that f16 holds. out: gq_row_bytes bytes.
void encode_gq_row(int bits, std::span<const uint8_t> code, std::span<const float> scale, std::span<const float> zero,
                   std::span<std::byte> out);

/// Reads one row's fields back. code: [K], scale, zero: [G].
void read_gq_row(int bits, std::span<const std::byte> row, std::span<uint8_t> code, std::span<float> scale,
                 std::span<float> zero);

/// Layout::size, ::decode and ::first_bad of the gq layouts. decode_gq defines them.
int64_t gq_size(const Layout& layout, Shape shape, Params params);
void decode_gq(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, int64_t row0,
               int64_t rows, float* out);
int64_t first_bad_gq_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes);

}  // namespace lacuna::layout
