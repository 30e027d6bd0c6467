// src/layout/q2_K.h - 2-bit codes, 16 sub-blocks of 16 with 4-bit scales and minima, 256 weights a block (ggml's Q2_K).
// W: [N, K] row-major, K % 256 == 0. A row is K/256 blocks:
//   scale_min  u8[16]   sub-block s = weights 16s..16s+15: low nibble = its scale, high nibble = its minimum, both
//   0..15 code       u8[64]   2 bits a weight, see below d          f16      weight = (d * scale) * code - (dmin *
//   min), code in 0..3 dmin       f16
// Code of weight k: half h = k / 128, quarter q = (k % 128) / 32, place l = k % 32: bits 2q, 2q+1 of code[32h + l].
// 84 bytes per 256 weights = 2.625 bits/weight.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

template <int kLength>
struct AffineSuperblock;

struct Q2KBlock {
  static constexpr int64_t kCols = 256;
  uint8_t scale_min[16];
  uint8_t code[64];
  f16 d;
  f16 dmin;
};
static_assert(sizeof(Q2KBlock) == 84);

/// Encodes one block. w: [256]; importance: [256] or empty.
void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q2KBlock> out);

/// The block of these scales and codes.
void pack_block(const AffineSuperblock<16>& fit, Q2KBlock& out);

/// Decodes one block; this function defines the format. w: [256].
void decode_block(const Q2KBlock& block, float* w);

}  // namespace lacuna::layout
