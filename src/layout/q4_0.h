// src/layout/q4_0.h - 4-bit codes, one scale, 32 weights a block (ggml's Q4_0).
// W: [N, K] row-major, K % 32 == 0. A row is K/32 blocks:
//   scale  f16      weight = (code - 8) * scale, code in 0..15; the scale may be negative
//   code   u8[16]   byte j: low nibble = weight j, high nibble = weight j + 16
// 18 bytes per 32 weights = 4.5 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

struct Q4_0Block {
  static constexpr int64_t kCols = 32;
  f16 scale;
  uint8_t code[16];
};
static_assert(sizeof(Q4_0Block) == 18);

/// Encodes w.size() / 32 <= 8 blocks. importance: [w.size()] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q4_0Block> out);

/// Decodes one block; this function defines the format. w: [32].
void decode_block(const Q4_0Block& block, float* w);

}  // namespace lacuna::layout
