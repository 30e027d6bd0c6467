#include "layout/q4_0.h"

#include "layout/block32.h"

namespace lacuna::layout {

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q4_0Block> out) {
  static constexpr float kCandidates[] = {-6.6f, -7.0f,  -7.4f,  -7.7f, -8.0f, -8.3f, -8.6f, -9.0f,
                                          -9.5f, -10.0f, -11.0f, 6.6f,  7.0f,  7.4f,  7.8f,  8.4f};
  const Blocks32 fit = fit_symmetric_blocks(w, importance, -8, 7, kCandidates, 2);
  for (size_t b = 0; b < out.size(); ++b) {
    out[b].scale = fit.scale[b];
    for (int j = 0; j < 16; ++j) out[b].code[j] = uint8_t((fit.code[b][j] + 8) | (fit.code[b][j + 16] + 8) << 4);
  }
}

void decode_block(const Q4_0Block& block, float* w) {
  const float scale = to_float(block.scale);
  for (int j = 0; j < 16; ++j) {
    w[j] = float((block.code[j] & 15) - 8) * scale;
    w[j + 16] = float((block.code[j] >> 4) - 8) * scale;
  }
}

}  // namespace lacuna::layout
