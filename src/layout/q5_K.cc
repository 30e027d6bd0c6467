#include "layout/q5_K.h"

#include "layout/six_bit.h"

namespace lacuna::layout {

void decode_block(const Q5KBlock& block, float* w) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (int s = 0; s < 8; ++s) {
    const ScaleMin packed = unpack_six_bit(block.scale_min, s);
    const float scale = d * float(packed.scale), min = dmin * float(packed.min);
    const uint8_t* low = block.low + 32 * (s / 2);
    const int shift = s % 2 * 4;
    for (int l = 0; l < 32; ++l)
      w[32 * s + l] = scale * float((low[l] >> shift & 15) + (block.high[l] >> s & 1) * 16) - min;
  }
}

}  // namespace lacuna::layout
