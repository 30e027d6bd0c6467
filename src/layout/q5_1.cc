#include "layout/q5_1.h"

#include <cstring>

namespace lacuna::layout {

void decode_block(const Q5_1Block& block, float* w) {
  const float scale = to_float(block.scale), min = to_float(block.min);
  uint32_t high;
  std::memcpy(&high, block.high, sizeof(high));
  for (int j = 0; j < 16; ++j) {
    w[j] = float((block.low[j] & 15u) | ((high >> j & 1) << 4)) * scale + min;
    w[j + 16] = float((block.low[j] >> 4) | ((high >> (j + 16) & 1) << 4)) * scale + min;
  }
}

}  // namespace lacuna::layout
