#include "layout/q6_K.h"

namespace lacuna::layout {

void decode_block(const Q6KBlock& block, float* w) {
  const float d = to_float(block.d);
  for (int s = 0; s < 16; ++s) {
    const float scale = d * float(block.scale[s]);
    const int half = s / 8, quarter = s % 8 / 2, place = 16 * (s % 2);
    const uint8_t* low = block.low + 64 * half + 32 * (quarter % 2) + place;
    const uint8_t* high = block.high + 32 * half + place;
    const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
    for (int l = 0; l < 16; ++l)
      w[16 * s + l] = scale * float((low[l] >> low_shift & 15) + (high[l] >> high_shift & 3) * 16 - 32);
  }
}

}  // namespace lacuna::layout
