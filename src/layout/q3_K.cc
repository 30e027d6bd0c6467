#include "layout/q3_K.h"

#include "layout/superblock.h"

namespace lacuna::layout {

void pack_block(const SymmetricSuperblock<16>& fit, Q3KBlock& out) {
  Q3KBlock block{};
  block.d = fit.d;
  for (int s = 0; s < 16; ++s) {
    const int scale = fit.scale[s] + 32;
    block.scale[s % 8] |= uint8_t((scale & 15) << (s / 8 * 4));
    block.scale[8 + s % 4] |= uint8_t((scale >> 4) << (s / 4 * 2));
  }
  for (int k = 0; k < 256; ++k) {
    const int code = fit.code[k] + 4;
    block.low[k / 128 * 32 + k % 32] |= uint8_t((code & 3) << (k % 128 / 32 * 2));
    block.high[k % 32] |= uint8_t((code >> 2) << (k / 32));
  }
  out = block;
}

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q3KBlock> out) {
  static constexpr float kCandidates[] = {-2.8f, -3.2f, -3.5f, -3.8f, -4.1f, -4.4f, -4.8f,
                                          -5.4f, -6.0f, 2.7f,  3.1f,  3.5f,  4.0f};
  const auto fit = fit_symmetric_superblock<16>(w, importance,
                                                {.lowest = -4,
                                                 .highest = 3,
                                                 .scale_lowest = -32,
                                                 .scale_highest = 31,
                                                 .candidates = kCandidates,
                                                 .fit_rounds = 1,
                                                 .rounds = 3});
  pack_block(fit, out[0]);
}

void decode_block(const Q3KBlock& block, float* w) {
  const float d = to_float(block.d);
  for (int s = 0; s < 16; ++s) {
    const int bits = (block.scale[s % 8] >> (s < 8 ? 0 : 4) & 15) | (block.scale[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
    const float scale = d * float(bits - 32);
    const uint8_t* low = block.low + 32 * (s / 8) + 16 * (s % 2);
    const uint8_t* high = block.high + 16 * (s % 2);
    const int shift = s % 8 / 2 * 2, high_bit = s / 2;
    for (int l = 0; l < 16; ++l)
      w[16 * s + l] = scale * float((low[l] >> shift & 3) + (high[l] >> high_bit & 1) * 4 - 4);
  }
}

}  // namespace lacuna::layout
