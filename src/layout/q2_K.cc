#include "layout/q2_K.h"

#include "layout/superblock.h"

namespace lacuna::layout {

void pack_block(const AffineSuperblock<16>& fit, Q2KBlock& out) {
  Q2KBlock block{};
  block.d = fit.d;
  block.dmin = fit.dmin;
  for (int s = 0; s < 16; ++s) block.scale_min[s] = uint8_t(fit.scale[s] | fit.min[s] << 4);
  for (int k = 0; k < 256; ++k) block.code[k / 128 * 32 + k % 32] |= uint8_t(fit.code[k] << (k % 128 / 32 * 2));
  out = block;
}

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q2KBlock> out) {
  static constexpr float kMargins[] = {-0.2f, 0.1f, 0.4f, 0.7f, 1.1f};
  const auto fit = fit_affine_superblock<16>(
      w, importance, {.top = 3, .levels = 15, .margins = kMargins, .fit_rounds = 1, .rounds = 3});
  pack_block(fit, out[0]);
}

void decode_block(const Q2KBlock& block, float* w) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (int s = 0; s < 16; ++s) {
    const float scale = d * float(block.scale_min[s] & 15), min = dmin * float(block.scale_min[s] >> 4);
    const uint8_t* code = block.code + 32 * (s / 8) + 16 * (s % 2);
    const int shift = s % 8 / 2 * 2;
    for (int l = 0; l < 16; ++l) w[16 * s + l] = scale * float(code[l] >> shift & 3) - min;
  }
}

}  // namespace lacuna::layout
