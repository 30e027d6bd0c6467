// src/layout/q4_K.h - 4-bit codes, 8 sub-blocks of 32 with 6-bit scales and minima, 256 weights a block (ggml's Q4_K).
// W: [N, K] row-major, K % 256 == 0. A row is K/256 blocks:
//   d          f16      weight = (d * scale) * code - (dmin * min), code in 0..15, scale and min in 0..63
//   dmin       f16
//   scale_min  u8[12]   6-bit scales and minima of the sub-blocks, packed as six_bit.h says
//   code       u8[128]  byte 32p + l: low nibble = weight l of sub-block 2p, high nibble = weight l of sub-block 2p + 1
// 144 bytes per 256 weights = 4.5 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

template <int kLength>
struct AffineSuperblock;

struct Q4KBlock {
  static constexpr int64_t kCols = 256;
  f16 d;
  f16 dmin;
  uint8_t scale_min[12];
  uint8_t code[128];
};
static_assert(sizeof(Q4KBlock) == 144);

/// Encodes one block. w: [256]; importance: [256] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q4KBlock> out);

/// The block of these scales and codes.
void pack_block(const AffineSuperblock<32>& fit, Q4KBlock& out);

/// Decodes one block; this function defines the format. w: [256].
void decode_block(const Q4KBlock& block, float* w);

}  // namespace lacuna::layout
