// src/layout/q6_K.h - 6-bit codes, 16 sub-blocks of 16 with 8-bit scales, 256 weights a block (ggml's Q6_K).
// W: [N, K] row-major, K % 256 == 0. A row is K/256 blocks:
//   low     u8[128]  bits 0..3 of the codes, see below
//   high    u8[64]   bits 4 and 5 of the codes
//   scale   i8[16]   of sub-block s = weights 16s..16s+15
//   d       f16      weight = (d * scale) * (code - 32), code in 0..63
// Code of weight k: half h = k / 128, quarter q = (k % 128) / 32, place l = k % 32: nibble q / 2 (0 is the low one) of
// low[64h + 32(q % 2) + l], and bits 2q, 2q+1 of high[32h + l].
// 210 bytes per 256 weights = 6.5625 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

template <int kLength>
struct SymmetricSuperblock;

struct Q6KBlock {
  static constexpr int64_t kCols = 256;
  uint8_t low[128];
  uint8_t high[64];
  int8_t scale[16];
  f16 d;
};
static_assert(sizeof(Q6KBlock) == 210);

/// Encodes one block. w: [256]; importance: [256] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q6KBlock> out);

/// The block of these scales and codes.
void pack_block(const SymmetricSuperblock<16>& fit, Q6KBlock& out);

/// Decodes one block; this function defines the format. w: [256].
void decode_block(const Q6KBlock& block, float* w);

}  // namespace lacuna::layout
