#include "layout/q8_0.h"

#include "layout/block32.h"

namespace lacuna::layout {

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q8_0Block> out) {
  static constexpr float kCandidates[] = {119.0f, 120.0f, 121.0f, 122.0f, 123.0f, 124.0f,
                                          124.5f, 125.0f, 125.5f, 126.0f, 126.5f, 127.0f};
  const Blocks32 fit = fit_symmetric_blocks(w, importance, -127, 127, kCandidates, 1);
  for (size_t b = 0; b < out.size(); ++b) {
    out[b].scale = fit.scale[b];
    for (int j = 0; j < 32; ++j) out[b].code[j] = fit.code[b][j];
  }
}

void decode_block(const Q8_0Block& block, float* w) {
  const float scale = to_float(block.scale);
  for (int j = 0; j < 32; ++j) w[j] = float(block.code[j]) * scale;
}

}  // namespace lacuna::layout
