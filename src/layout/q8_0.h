// src/layout/q8_0.h - 8-bit codes, one scale, 32 weights a block (ggml's Q8_0).
// W: [N, K] row-major, K % 32 == 0. A row is K/32 blocks:
//   scale  f16      weight = code * scale, code in -127..127 (readers accept -128)
//   code   i8[32]   in the order of the weights
// 34 bytes per 32 weights = 8.5 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

struct Q8_0Block {
  static constexpr int64_t kCols = 32;
  f16 scale;
  int8_t code[32];
};
static_assert(sizeof(Q8_0Block) == 34);

/// Encodes w.size() / 32 <= 8 blocks. importance: [w.size()] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q8_0Block> out);

/// Decodes one block; this function defines the format. w: [32].
void decode_block(const Q8_0Block& block, float* w);

}  // namespace lacuna::layout
