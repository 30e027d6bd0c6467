// src/layout/q5_0.h - 5-bit codes, one scale, 32 weights a block (ggml's Q5_0).
// W: [N, K] row-major, K % 32 == 0. A row is K/32 blocks:
//   scale  f16      weight = (code - 16) * scale, code in 0..31; the scale may be negative
//   high   u8[4]    bit 4 of the code of weight j is bit j of this little-endian 32-bit word
//   low    u8[16]   bits 0..3. Byte j: low nibble = weight j, high nibble = weight j + 16
// 22 bytes per 32 weights = 5.5 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

struct Q5_0Block {
  static constexpr int64_t kCols = 32;
  f16 scale;
  uint8_t high[4];
  uint8_t low[16];
};
static_assert(sizeof(Q5_0Block) == 22);

/// Encodes w.size() / 32 <= 8 blocks. importance: [w.size()] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q5_0Block> out);

/// Decodes one block; this function defines the format. w: [32].
void decode_block(const Q5_0Block& block, float* w);

}  // namespace lacuna::layout
