// src/layout/zigzag_pack.h - zigzag superblocks from codes that a solver chose, grouped along the outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "layout/layout.h"

namespace lacuna::layout {

/// What a solver returns: weight = scale * code - min, where the outputs [g * group, (g + 1) * group) of a column share
/// scale and min. Codes: zz2_k 0..3, zz4_k 0..15, zz5_k 0..31; without mins zz3_k -4..3, zz6_k -32..31, zz8 -127..127.
struct ZigzagCodes {
  std::span<const int8_t> code;     // [N, K]
  std::span<const float> scale;     // [ceil(N / group), K]; not negative where there are mins
  std::span<const float> min = {};  // as scale; within a superblock of one sign. Empty for zz3_k, zz6_k, zz8
};

/// Outputs of a group: 32 for zz4_k, zz5_k and zz8, 16 for the others.
int64_t zigzag_group(const Layout& layout);

/// Writes superblock row r into `out`, the whole matrix; rows in any order, also at the same time. Codes are kept
/// exactly. zz8 keeps scales as f16; the others as small integers s times one f16 d for each superblock (mins
/// likewise), d chosen among half to all of the integers' range so that the sum of sum(code^2) * (scale - d * s)^2 over
/// the groups is least. With d0 = largest |scale| / largest integer that sum is at most that of rounding to multiples
/// of d0: each scale within d0 / 2, but for f16's rounding of d0. Throws Error naming output and input for a code or
/// scale that the layout cannot hold.
void pack_zigzag(const Layout& layout, Shape shape, Params params, int64_t r, const ZigzagCodes& codes,
                 std::span<std::byte> out);

}  // namespace lacuna::layout
