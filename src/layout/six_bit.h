// src/layout/six_bit.h - eight 6-bit scales and eight 6-bit minima in 12 bytes (q4_K, q5_K).
//   s < 4:   scale = bits 0..5 of byte s,                                        min = bits 0..5 of byte s + 4
//   s >= 4:  scale = low nibble of byte s + 4, its bits 4..5 = bits 6..7 of byte s - 4
//            min = high nibble of byte s + 4, its bits 4..5 = bits 6..7 of byte s
#pragma once

#include <cstdint>

namespace lacuna::layout {

struct ScaleMin {
  uint8_t scale, min;  // 0..63
};

/// s: sub-block 0..7. packed: [12].
inline ScaleMin unpack_six_bit(const uint8_t* packed, int s) {
  if (s < 4) return {uint8_t(packed[s] & 63), uint8_t(packed[s + 4] & 63)};
  return {uint8_t((packed[s + 4] & 15) | (packed[s - 4] >> 6 << 4)),
          uint8_t((packed[s + 4] >> 4) | (packed[s] >> 6 << 4))};
}

/// The inverse. scale, min: [8], values 0..63; packed: [12].
inline void pack_six_bit(const uint8_t* scale, const uint8_t* min, uint8_t* packed) {
  for (int s = 0; s < 4; ++s) {
    packed[s] = uint8_t(scale[s] | (scale[s + 4] >> 4 << 6));
    packed[s + 4] = uint8_t(min[s] | (min[s + 4] >> 4 << 6));
    packed[s + 8] = uint8_t((scale[s + 4] & 15) | ((min[s + 4] & 15) << 4));
  }
}

}  // namespace lacuna::layout
