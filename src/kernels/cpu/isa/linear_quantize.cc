// src/kernels/cpu/isa/linear_quantize.cc - float inputs to int8 with one scale per 32, once per group of weights.
#include "kernels/cpu/isa/linear_table.h"
#include "kernels/cpu/isa/linear_vec.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

typedef RegI Mask;

/// 32 floats as two times 16 lanes.
struct Block32 {
  F32x16 half[2];
};

LACUNA_INLINE uint32_t max_magnitude_bits(const Block32& x) {
  RegU top = {};
  for (const F32x16& half : x.half) {
    for (int i = 0; i < kRegs; ++i) {
      const RegU bits = (RegU)half.reg[i] & (RegU)splat_reg(0x7fffffff);
      const RegU larger = (RegU)((RegI)bits > (RegI)top);
      top = (bits & larger) | (top & ~larger);
    }
  }
  uint32_t lanes[kLanes], out = 0;
  __builtin_memcpy(lanes, &top, sizeof(lanes));
  for (int i = 0; i < kLanes; ++i) out = lanes[i] > out ? lanes[i] : out;
  return out;
}

/// Scale absmax/127, codes rounded to nearest even. A NaN or an infinity makes the scale NaN, so that every output that
/// reads the block becomes NaN.
LACUNA_INLINE float quantize_block(const float* x, int8_t* codes, int32_t sums[2]) {
  Block32 block = {{load_f32(x), load_f32(x + 16)}};
  const uint32_t magnitude = max_magnitude_bits(block);
  float absmax;
  __builtin_memcpy(&absmax, &magnitude, 4);
  if (magnitude == 0 || magnitude >= 0x7f800000u) {
    __builtin_memset(codes, 0, 32);
    sums[0] = sums[1] = 0;
    return magnitude == 0 ? 0.0f : __builtin_nanf("");
  }
  // 127 / absmax overflows for tiny inputs: those are scaled up first (exact).
  const float up = absmax < 0x1p-100f ? 0x1p64f : 1.0f;
  const float inverse = 127.0f / (absmax * up);
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
  const F32x16 magic = splat(0x1.8p23f);
  for (int h = 0; h < 2; ++h) {
    const F32x16 rounded = block.half[h] * splat(up) * splat(inverse) + magic;
    int32_t wide[16];
    __builtin_memcpy(wide, &rounded, 64);
    int32_t sum = 0;
    int8_t narrow[16];
    for (int i = 0; i < 16; ++i) {
      const int32_t code = wide[i] - 0x4b400000;
      narrow[i] = int8_t(code);
      sum += code;
    }
    __builtin_memcpy(codes + 16 * h, narrow, 16);
    sums[h] = sum;
  }
  return absmax / 127.0f;
}

}  // namespace

void quantize(const QuantizeArgs& a) {
  const int64_t blocks = a.K / kBlock;
  for (int64_t t = a.token0; t < a.token1; ++t) {
    const float* x = a.x + t * a.x_stride;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = b * a.tokens + t;
      int32_t sums[2];
      const float scale = quantize_block(x + b * kBlock, a.codes + at * kBlock, sums);
      a.scale[at] = scale;
      for (int e = 0; e < a.extra_count; ++e) {
        const QuantizeArgs::Extra& extra = a.extras[e];
        if (extra.needs.group == 32) {
          const int32_t sum = sums[0] + sums[1];
          if (extra.start != nullptr) extra.start[at] = -extra.needs.offset * sum;
          if (extra.sum != nullptr) extra.sum[at] = scale * float(sum);
        } else {
          for (int h = 0; h < 2; ++h) {
            if (extra.start != nullptr) extra.start[2 * at + h] = -extra.needs.offset * sums[h];
            if (extra.sum != nullptr) extra.sum[2 * at + h] = scale * float(sums[h]);
          }
        }
      }
    }
  }
}

}  // namespace lacuna::cpu::LACUNA_ISA
