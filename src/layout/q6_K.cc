#include "layout/q6_K.h"

#include "layout/superblock.h"

namespace lacuna::layout {

void pack_block(const SymmetricSuperblock<16>& fit, Q6KBlock& out) {
  Q6KBlock block{};
  block.d = fit.d;
  for (int s = 0; s < 16; ++s) block.scale[s] = fit.scale[s];
  for (int k = 0; k < 256; ++k) {
    const int code = fit.code[k] + 32, half = k / 128, quarter = k % 128 / 32, place = k % 32;
    block.low[64 * half + 32 * (quarter % 2) + place] |= uint8_t((code & 15) << (quarter / 2 * 4));
    block.high[32 * half + place] |= uint8_t((code >> 4) << (quarter * 2));
  }
  out = block;
}

void encode_blocks(std::span<const float> w, std::span<const float> importance, std::span<Q6KBlock> out) {
  static constexpr float kCandidates[] = {-29.5f, -30.2f, -30.8f, -31.3f, -31.8f, -32.2f, -32.7f,
                                          -33.4f, -34.2f, -35.4f, -37.0f, 30.0f,  31.0f,  31.6f};
  const auto fit = fit_symmetric_superblock<16>(w, importance,
                                                {.lowest = -32,
                                                 .highest = 31,
                                                 .scale_lowest = -128,
                                                 .scale_highest = 127,
                                                 .candidates = kCandidates,
                                                 .fit_rounds = 1,
                                                 .rounds = 2});
  pack_block(fit, out[0]);
}

void decode_block(const Q6KBlock& block, float* w) {
  const float d = to_float(block.d);
  for (int s = 0; s < 16; ++s) {
    const float scale = d * float(block.scale[s]);
    const int half = s / 8, quarter = s % 8 / 2, place = 16 * (s % 2);
    const uint8_t* low = block.low + 64 * half + 32 * (quarter % 2) + place;
    const uint8_t* high = block.high + 32 * half + place;
    const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
    for (int l = 0; l < 16; ++l)
      w[16 * s + l] = scale * float((low[l] >> low_shift & 15) + (high[l] >> high_shift & 3) * 16 - 32);
  }
}

}  // namespace lacuna::layout
