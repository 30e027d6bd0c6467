#include "layout/q4_K.h"

#include "layout/six_bit.h"

namespace lacuna::layout {

void decode_block(const Q4KBlock& block, float* w) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (int s = 0; s < 8; ++s) {
    const ScaleMin packed = unpack_six_bit(block.scale_min, s);
    const float scale = d * float(packed.scale), min = dmin * float(packed.min);
    const uint8_t* code = block.code + 32 * (s / 2);
    const int shift = s % 2 * 4;
    for (int l = 0; l < 32; ++l) w[32 * s + l] = scale * float(code[l] >> shift & 15) - min;
  }
}

}  // namespace lacuna::layout
