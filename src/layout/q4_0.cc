#include "layout/q4_0.h"

namespace lacuna::layout {

void decode_block(const Q4_0Block& block, float* w) {
  const float scale = to_float(block.scale);
  for (int j = 0; j < 16; ++j) {
    w[j] = float((block.code[j] & 15) - 8) * scale;
    w[j + 16] = float((block.code[j] >> 4) - 8) * scale;
  }
}

}  // namespace lacuna::layout
