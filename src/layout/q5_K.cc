#include "layout/q5_K.h"

#include "layout/six_bit.h"
#include "layout/superblock.h"

namespace lacuna::layout {

void pack_block(const AffineSuperblock<32>& fit, Q5KBlock& out) {
  Q5KBlock block{};
  block.d = fit.d;
  block.dmin = fit.dmin;
  pack_six_bit(fit.scale, fit.min, block.scale_min);
  for (int k = 0; k < 256; ++k) {
    block.low[k / 64 * 32 + k % 32] |= uint8_t((fit.code[k] & 15) << (k % 64 / 32 * 4));
    block.high[k % 32] |= uint8_t((fit.code[k] >> 4) << (k / 32));
  }
  out = block;
}

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q5KBlock> out) {
  static constexpr float kMargins[] = {-0.5f, -0.2f, 0.1f, 0.4f, 0.7f, 1.1f};
  const auto fit = fit_affine_superblock<32>(
      w, importance, {.top = 31, .levels = 63, .margins = kMargins, .fit_rounds = 1, .rounds = 3});
  pack_block(fit, out[0]);
}

void decode_block(const Q5KBlock& block, float* w) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (int s = 0; s < 8; ++s) {
    const ScaleMin packed = unpack_six_bit(block.scale_min, s);
    const float scale = d * float(packed.scale), min = dmin * float(packed.min);
    const uint8_t* low = block.low + 32 * (s / 2);
    const int shift = s % 2 * 4;
    for (int l = 0; l < 32; ++l)
      w[32 * s + l] = scale * float((low[l] >> shift & 15) + (block.high[l] >> s & 1) * 16) - min;
  }
}

}  // namespace lacuna::layout
