#include "layout/q5_0.h"

#include <cstring>

namespace lacuna::layout {

void decode_block(const Q5_0Block& block, float* w) {
  const float scale = to_float(block.scale);
  uint32_t high;
  std::memcpy(&high, block.high, sizeof(high));
  for (int j = 0; j < 16; ++j) {
    w[j] = float(int((block.low[j] & 15u) | ((high >> j & 1) << 4)) - 16) * scale;
    w[j + 16] = float(int((block.low[j] >> 4) | ((high >> (j + 16) & 1) << 4)) - 16) * scale;
  }
}

}  // namespace lacuna::layout
