#include "layout/q3_K.h"

namespace lacuna::layout {

void decode_block(const Q3KBlock& block, float* w) {
  const float d = to_float(block.d);
  for (int s = 0; s < 16; ++s) {
    const int bits = (block.scale[s % 8] >> (s < 8 ? 0 : 4) & 15) | (block.scale[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
    const float scale = d * float(bits - 32);
    const uint8_t* low = block.low + 32 * (s / 8) + 16 * (s % 2);
    const uint8_t* high = block.high + 16 * (s % 2);
    const int shift = s % 8 / 2 * 2, high_bit = s / 2;
    for (int l = 0; l < 16; ++l)
      w[16 * s + l] = scale * float((low[l] >> shift & 3) + (high[l] >> high_bit & 1) * 4 - 4);
  }
}

}  // namespace lacuna::layout
