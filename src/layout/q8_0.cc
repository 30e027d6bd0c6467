#include "layout/q8_0.h"

namespace lacuna::layout {

void decode_block(const Q8_0Block& block, float* w) {
  const float scale = to_float(block.scale);
  for (int j = 0; j < 32; ++j) w[j] = float(block.code[j]) * scale;
}

}  // namespace lacuna::layout
