#include "layout/q2_K.h"

namespace lacuna::layout {

void decode_block(const Q2KBlock& block, float* w) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (int s = 0; s < 16; ++s) {
    const float scale = d * float(block.scale_min[s] & 15), min = dmin * float(block.scale_min[s] >> 4);
    const uint8_t* code = block.code + 32 * (s / 8) + 16 * (s % 2);
    const int shift = s % 8 / 2 * 2;
    for (int l = 0; l < 16; ++l) w[16 * s + l] = scale * float(code[l] >> shift & 3) - min;
  }
}

}  // namespace lacuna::layout
