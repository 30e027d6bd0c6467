// src/layout/nm24_q4.h - nm24_q4: 2:4 sparse, 4-bit codes in groups of 64 inputs.
// W: [N, K] row-major, K % 64 == 0. A row is K/64 blocks, each covering 64 inputs of which 32 weights are kept, two of
// every four consecutive ones:
//   scale f16      weight = scale * (code - 8), code in 0..15
//   index u8[8]    2 bits per kept weight: its place 0..3 in its group of four, ascending, low bits first
//   code  u8[16]   4 bits per kept weight, same order, low nibble first
// 26 bytes per 64 weights = 3.25 bits/weight, no padding. Dropped weights are +0.
#pragma once

#include <cstdint>
#include <span>

#include "core/scalar.h"
#include "layout/layout.h"

namespace lacuna::layout {

struct Nm24Q4Block {
  static constexpr int64_t kCols = 64, kKept = 32;
  f16 scale;
  uint8_t index[8];
  uint8_t code[16];
};
static_assert(sizeof(Nm24Q4Block) == 26);

/// Encodes one row, rounded to nearest. w, keep: [K], K % 64 == 0; out: [K / 64]. Throws Error naming the group of four
/// that does not keep exactly two.
void encode_row(std::span<const float> w, std::span<const uint8_t> keep, std::span<Nm24Q4Block> out);

/// The same from codes: code, keep: [K], scale: [K / 64] finite values that f16 holds.
void pack_row(std::span<const uint8_t> code, std::span<const float> scale, std::span<const uint8_t> keep,
              std::span<Nm24Q4Block> out);

/// Decodes one block; this function defines the layout. w: [64].
void decode_block(const Nm24Q4Block& block, float* w);

/// Marks two of every four weights as kept: those that are not 0, then the first zeros. w, keep: [K], K % 4 == 0.
/// Throws Error naming the group of four that has three or four which are not 0.
void keep_two_of_four(std::span<const float> w, std::span<uint8_t> keep);

/// Every index pair ascends.
bool is_ascending(const Nm24Q4Block& block);

}  // namespace lacuna::layout
