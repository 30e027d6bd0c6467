#include "layout/q5_0.h"

#include <cstring>

#include "layout/block32.h"

namespace lacuna::layout {

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q5_0Block> out) {
  static constexpr float kCandidates[] = {-14.2f, -14.7f, -15.1f, -15.4f, -15.7f, -16.0f, -16.3f, -16.7f,
                                          -17.2f, -17.8f, -18.5f, -20.0f, 14.7f,  15.2f,  15.8f};
  const Blocks32 fit = fit_symmetric_blocks(w, importance, -16, 15, kCandidates, 2);
  for (size_t b = 0; b < out.size(); ++b) {
    out[b].scale = fit.scale[b];
    uint32_t high = 0;
    for (int j = 0; j < 32; ++j) high |= uint32_t((fit.code[b][j] + 16) >> 4) << j;
    std::memcpy(out[b].high, &high, sizeof(high));
    for (int j = 0; j < 16; ++j)
      out[b].low[j] = uint8_t(((fit.code[b][j] + 16) & 15) | ((fit.code[b][j + 16] + 16) & 15) << 4);
  }
}

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
