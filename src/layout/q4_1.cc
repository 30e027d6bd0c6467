#include "layout/q4_1.h"

#include "layout/block32.h"

namespace lacuna::layout {

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q4_1Block> out) {
  static constexpr float kMargins[] = {-0.5f, -0.2f, 0.1f, 0.4f, 0.7f, 1.1f};
  const Blocks32 fit = fit_affine_blocks(w, importance, 15, kMargins, 2);
  for (size_t b = 0; b < out.size(); ++b) {
    out[b].scale = fit.scale[b];
    out[b].min = fit.min[b];
    for (int j = 0; j < 16; ++j) out[b].code[j] = uint8_t((fit.code[b][j]) | (fit.code[b][j + 16]) << 4);
  }
}

void decode_block(const Q4_1Block& block, float* w) {
  const float scale = to_float(block.scale), min = to_float(block.min);
  for (int j = 0; j < 16; ++j) {
    w[j] = float(block.code[j] & 15) * scale + min;
    w[j + 16] = float(block.code[j] >> 4) * scale + min;
  }
}

}  // namespace lacuna::layout
