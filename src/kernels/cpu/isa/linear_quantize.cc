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

/// Codes and their sums per 16 of one plane.
struct Plane {
  int8_t* codes;  // [32]
  int32_t sums[2];
};

/// Scale absmax/127, codes rounded to nearest even; the second plane, where asked for, holds what rounding left, in
/// steps of 1/kPlaneRatio. Returns the first plane's scale. A NaN or an infinity makes it NaN, so that every output
/// that reads the block becomes NaN.
template <int kPlanes>
LACUNA_INLINE float quantize_block(const float* x, Plane* planes) {
  Block32 block = {{load_f32(x), load_f32(x + 16)}};
  const uint32_t magnitude = max_magnitude_bits(block);
  float absmax;
  __builtin_memcpy(&absmax, &magnitude, 4);
  if (magnitude == 0 || magnitude >= 0x7f800000u) {
    for (int p = 0; p < kPlanes; ++p) {
      __builtin_memset(planes[p].codes, 0, 32);
      planes[p].sums[0] = planes[p].sums[1] = 0;
    }
    return magnitude == 0 ? 0.0f : __builtin_nanf("");
  }
  // 127 / absmax overflows for tiny inputs: those are scaled up first (exact).
  const float up = absmax < 0x1p-100f ? 0x1p64f : 1.0f;
  const float inverse = 127.0f / (absmax * up);
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
  const F32x16 magic = splat(0x1.8p23f);
  for (int h = 0; h < 2; ++h) {
    F32x16 left = block.half[h] * splat(up) * splat(inverse);  // in steps of the plane
    for (int p = 0; p < kPlanes; ++p) {
      const F32x16 rounded = left + magic;
      int32_t wide[16];
      __builtin_memcpy(wide, &rounded, 64);
      int32_t sum = 0;
      int8_t narrow[16];
      for (int i = 0; i < 16; ++i) {
        const int32_t code = wide[i] - 0x4b400000;
        narrow[i] = int8_t(code);
        sum += code;
      }
      __builtin_memcpy(planes[p].codes + 16 * h, narrow, 16);
      planes[p].sums[h] = sum;
      // Both differences are exact: the rounded value lies within half a step.
      left = (left + (rounded + magic * splat(-1.0f)) * splat(-1.0f)) * splat(kPlaneRatio);
    }
  }
  return absmax / 127.0f;
}

void quantize_planes(const QuantizeArgs& a) {
  for (int64_t b = 0; b < a.K / kBlock; ++b) {
    const int64_t at = 2 * b;
    Plane planes[2] = {{a.codes + at * kBlock, {}}, {a.codes + (at + 1) * kBlock, {}}};
    const float scale = quantize_block<2>(a.x + b * kBlock, planes), fine = scale / kPlaneRatio;
    a.scale[at] = scale;
    a.scale[at + 1] = fine;
    for (int e = 0; e < a.extra_count; ++e) {
      const QuantizeArgs::Extra& extra = a.extras[e];
      const int groups = 32 / extra.needs.group;
      for (int g = 0; g < groups; ++g) {
        int32_t sums[2];
        for (int p = 0; p < 2; ++p) sums[p] = groups == 1 ? planes[p].sums[0] + planes[p].sums[1] : planes[p].sums[g];
        if (extra.start != nullptr)
          for (int p = 0; p < 2; ++p) extra.start[(at + p) * groups + g] = -extra.needs.offset * sums[p];
        if (extra.sum != nullptr) {
          extra.sum[at * groups + g] = scale * float(sums[0]) + fine * float(sums[1]);
          extra.sum[(at + 1) * groups + g] = 0;
        }
      }
    }
  }
}

}  // namespace

void quantize(const QuantizeArgs& a) {
  if (a.planes) return quantize_planes(a);
  const int64_t blocks = a.K / kBlock;
  for (int64_t t = a.token0; t < a.token1; ++t) {
    const float* x = a.x + t * a.x_stride;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = b * a.tokens + t;
      Plane plane = {a.codes + at * kBlock, {}};
      const float scale = quantize_block<1>(x + b * kBlock, &plane);
      const int32_t* sums = plane.sums;
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
