#include "layout/q5_1.h"

#include <cstring>

#include "layout/block32.h"

namespace lacuna::layout {

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q5_1Block> out) {
  static constexpr float kMargins[] = {-0.5f, -0.2f, 0.1f, 0.4f, 0.7f, 1.1f};
  const Blocks32 fit = fit_affine_blocks(w, importance, 31, kMargins, 2);
  for (size_t b = 0; b < out.size(); ++b) {
    out[b].scale = fit.scale[b];
    out[b].min = fit.min[b];
    uint32_t high = 0;
    for (int j = 0; j < 32; ++j) high |= uint32_t((fit.code[b][j]) >> 4) << j;
    std::memcpy(out[b].high, &high, sizeof(high));
    for (int j = 0; j < 16; ++j) out[b].low[j] = uint8_t(((fit.code[b][j]) & 15) | ((fit.code[b][j + 16]) & 15) << 4);
  }
}

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
