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

/// Codes and their sums per 8 of one plane.
struct Plane {
  int8_t* codes;  // [32]
  int32_t sums[4];
};

/// The sum of group g of a block that has `groups`.
LACUNA_INLINE int32_t sum_of(const int32_t* sums, int groups, int g) {
  if (groups == 4) return sums[g];
  return groups == 2 ? sums[2 * g] + sums[2 * g + 1] : (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

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
      __builtin_memset(planes[p].sums, 0, sizeof(planes[p].sums));
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
      int8_t narrow[16];
      for (int quarter = 0; quarter < 2; ++quarter) {
        int32_t sum = 0;
        for (int i = 8 * quarter; i < 8 * quarter + 8; ++i) {
          const int32_t code = wide[i] - 0x4b400000;
          narrow[i] = int8_t(code);
          sum += code;
        }
        planes[p].sums[2 * h + quarter] = sum;
      }
      __builtin_memcpy(planes[p].codes + 16 * h, narrow, 16);
      // Both differences are exact: the rounded value lies within half a step.
      left = (left + (rounded + magic * splat(-1.0f)) * splat(-1.0f)) * splat(kPlaneRatio);
    }
  }
  return absmax / 127.0f;
}

/// Block b of a single token as units and groups of a gs layout. sums: per 8 inputs, of both planes.
LACUNA_INLINE void write_units(const QuantizeArgs& a, const QuantizeArgs::Extra& extra, int64_t b, float scale,
                               const Plane* planes) {
  const int64_t group = extra.needs.sparse_group, unit = group < kBlock ? group : kBlock, units = kBlock / unit;
  for (int64_t u = 0; u < units; ++u) {
    int8_t* to = extra.unit_codes + (b * units + u) * 2 * unit;
    float sum = 0;
    for (int p = 0; p < 2; ++p) {
      __builtin_memcpy(to + p * unit, planes[p].codes + u * unit, size_t(unit));
      sum += (p == 0 ? scale : scale / kPlaneRatio) * float(sum_of(planes[p].sums, int(units), int(u)));
    }
    extra.unit_scale[b * units + u] = scale;
    const int64_t k = b * kBlock + u * unit;
    float& total = extra.group_sum[k / group];
    total = k % group == 0 ? sum : total + sum;
  }
  if ((b + 1) * kBlock < a.K) return;
  // The rest of the last group, and one more.
  const int64_t groups = (a.K + group - 1) / group, first = (b + 1) * units, end = (groups + 1) * group / unit;
  __builtin_memset(extra.unit_codes + first * 2 * unit, 0, size_t((end - first) * 2 * unit));
  for (int64_t u = first; u < groups * group / unit + kReadPast; ++u) extra.unit_scale[u] = 0;
  for (int64_t g = groups; g < groups + kReadPast; ++g) extra.group_sum[g] = 0;
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
      if (extra.needs.sparse_group != 0) {
        write_units(a, extra, b, scale, planes);
        continue;
      }
      const int groups = 32 / extra.needs.group;
      for (int g = 0; g < groups; ++g) {
        int32_t sums[2];
        for (int p = 0; p < 2; ++p) sums[p] = sum_of(planes[p].sums, groups, g);
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
        const int groups = 32 / extra.needs.group;
        for (int g = 0; g < groups; ++g) {
          const int32_t sum = sum_of(sums, groups, g);
          if (extra.start != nullptr) extra.start[groups * at + g] = -extra.needs.offset * sum;
          if (extra.sum != nullptr) extra.sum[groups * at + g] = scale * float(sum);
        }
      }
    }
  }
}

}  // namespace lacuna::cpu::LACUNA_ISA
