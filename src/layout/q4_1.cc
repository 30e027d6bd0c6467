#include "layout/q4_1.h"

namespace lacuna::layout {

void decode_block(const Q4_1Block& block, float* w) {
  const float scale = to_float(block.scale), min = to_float(block.min);
  for (int j = 0; j < 16; ++j) {
    w[j] = float(block.code[j] & 15) * scale + min;
    w[j + 16] = float(block.code[j] >> 4) * scale + min;
  }
}

}  // namespace lacuna::layout
