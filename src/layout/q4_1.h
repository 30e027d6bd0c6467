// src/layout/q4_1.h - 4-bit codes, scale and minimum, 32 weights a block (ggml's Q4_1).
// W: [N, K] row-major, K % 32 == 0. A row is K/32 blocks:
//   scale  f16      weight = code * scale + min, code in 0..15
//   min    f16
//   code   u8[16]   byte j: low nibble = weight j, high nibble = weight j + 16
// 20 bytes per 32 weights = 5 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

struct Q4_1Block {
  static constexpr int64_t kCols = 32;
  f16 scale;
  f16 min;
  uint8_t code[16];
};
static_assert(sizeof(Q4_1Block) == 20);

/// Encodes w.size() / 32 <= 8 blocks. importance: [w.size()] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q4_1Block> out);

/// Decodes one block; this function defines the format. w: [32].
void decode_block(const Q4_1Block& block, float* w);

}  // namespace lacuna::layout
