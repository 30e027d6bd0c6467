// src/layout/q3_K.h - 3-bit codes, 16 sub-blocks of 16 with 6-bit scales, 256 weights a block (ggml's Q3_K).
// W: [N, K] row-major, K % 256 == 0. A row is K/256 blocks:
//   high    u8[32]   bit 2 of the codes, see below
//   low     u8[64]   bits 0 and 1 of the codes
//   scale   u8[12]   6 bits for each sub-block s = weights 16s..16s+15, stored plus 32:
//                      bits 0..3: byte s % 8, low nibble for s < 8, high nibble for s >= 8
//                      bits 4..5: byte 8 + s % 4, bits 2(s / 4) and 2(s / 4) + 1
//   d       f16      weight = (d * (scale - 32)) * (code - 4), scale in 0..63, code in 0..7
// Code of weight k: half h = k / 128, quarter q = (k % 128) / 32, place l = k % 32: bits 2q, 2q+1 of low[32h + l] and
// bit 4h + q of high[l].
// 110 bytes per 256 weights = 3.4375 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

template <int kLength>
struct SymmetricSuperblock;

struct Q3KBlock {
  static constexpr int64_t kCols = 256;
  uint8_t high[32];
  uint8_t low[64];
  uint8_t scale[12];
  f16 d;
};
static_assert(sizeof(Q3KBlock) == 110);

/// Encodes one block. w: [256]; importance: [256] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q3KBlock> out);

/// The block of these scales and codes.
void pack_block(const SymmetricSuperblock<16>& fit, Q3KBlock& out);

/// Decodes one block; this function defines the format. w: [256].
void decode_block(const Q3KBlock& block, float* w);

}  // namespace lacuna::layout
