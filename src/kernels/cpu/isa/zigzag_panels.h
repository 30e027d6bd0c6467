// src/kernels/cpu/isa/zigzag_panels.h - superblocks of a row as panels of int8 codes, for many tokens.
#pragma once

#include "kernels/cpu/isa/zigzag_codes.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/cpu/zigzag_kernel.h"

namespace lacuna::cpu::LACUNA_ISA {

/// Transposes 128-bit lanes: lane j of out[l] = lane l of in[j].
LACUNA_INLINE void transpose_lanes(const U32x16 in[4], U32x16 out[4]) {
#if defined(__AVX512BW__)
  const auto pick = []<int kOrder>(const __m512i& x, const __m512i& y) {
    return _mm512_maskz_shuffle_i32x4(__mmask16(0xffff), x, y, kOrder);
  };
  const auto reg = [&](int j) { return (__m512i)in[j].reg[0]; };
  const __m512i low01 = pick.template operator()<0x44>(reg(0), reg(1)),
                high01 = pick.template operator()<0xee>(reg(0), reg(1));
  const __m512i low23 = pick.template operator()<0x44>(reg(2), reg(3)),
                high23 = pick.template operator()<0xee>(reg(2), reg(3));
  out[0].reg[0] = (RegU)pick.template operator()<0x88>(low01, low23);
  out[1].reg[0] = (RegU)pick.template operator()<0xdd>(low01, low23);
  out[2].reg[0] = (RegU)pick.template operator()<0x88>(high01, high23);
  out[3].reg[0] = (RegU)pick.template operator()<0xdd>(high01, high23);
#elif defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {  // lanes 2 half and 2 half + 1
    for (int pair = 0; pair < 2; ++pair) {
      const auto a = (__m256i)in[2 * pair].reg[half], b = (__m256i)in[2 * pair + 1].reg[half];
      out[2 * half].reg[pair] = (RegU)_mm256_permute2x128_si256(a, b, 0x20);
      out[2 * half + 1].reg[pair] = (RegU)_mm256_permute2x128_si256(a, b, 0x31);
    }
  }
#else
  for (int l = 0; l < 4; ++l)
    for (int j = 0; j < 4; ++j) out[l].reg[j] = in[j].reg[l];
#endif
}

#if !defined(__AVX2__)
/// Smallest f16 >= x for 0 <= x, so that codes never pass 127.
LACUNA_INLINE uint16_t half_not_below(float x) {
  if (!(x > 0)) return 0;
  if (x < 0x1p-14f) {  // subnormal: steps of 2^-24
    const float steps = x * 0x1p24f;
    auto whole = uint32_t(steps);
    if (float(whole) < steps) ++whole;
    return uint16_t(whole);
  }
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  bits += 0x1fff;  // 13 bits are dropped
  const uint32_t exponent = (bits >> 23) - 112;
  return exponent >= 31 ? 0x7c00 : uint16_t((exponent << 10) | ((bits >> 13) & 0x3ff));
}
#endif

/// Scales of 16 outputs whose largest magnitudes are `top`, rounded up to f16, and what to multiply with.
LACUNA_INLINE F32x16 put_scales(const F32x16& top, uint8_t* scales) {
#if defined(__AVX512BW__)
  const __m512 wanted = _mm512_mul_ps((__m512)top.reg[0], _mm512_set1_ps(1.0f / 127 * (1 + 0x1p-22f)));
  const __m256i halves = _mm512_maskz_cvtps_ph(__mmask16(0xffff), wanted, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales), halves);
  const __m512 unit = _mm512_maskz_cvtph_ps(__mmask16(0xffff), halves);
  const __mmask16 some = _mm512_cmp_ps_mask(unit, _mm512_setzero_ps(), _CMP_GT_OQ);
  return {{(RegF)_mm512_maskz_div_ps(some, _mm512_set1_ps(1), unit)}};
#elif defined(__AVX2__)
  F32x16 inverse;
  for (int i = 0; i < 2; ++i) {
    const __m256 wanted = _mm256_mul_ps((__m256)top.reg[i], _mm256_set1_ps(1.0f / 127 * (1 + 0x1p-22f)));
    const __m128i halves = _mm256_cvtps_ph(wanted, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scales) + i, halves);
    const __m256 unit = _mm256_cvtph_ps(halves);
    const __m256 some = _mm256_cmp_ps(unit, _mm256_setzero_ps(), _CMP_GT_OQ);
    inverse.reg[i] = (RegF)_mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(1), unit));
  }
  return inverse;
#else
  float largest[16], inverse[16];
  uint16_t scale[16];
  store_f32(largest, top);
  for (int i = 0; i < 16; ++i) {
    scale[i] = half_not_below(largest[i] / 127);
    const float unit = half_to_float(scale[i]);
    inverse[i] = unit > 0 ? 1 / unit : 0;
  }
  __builtin_memcpy(scales, scale, 32);
  return load_f32(inverse);
#endif
}

/// 16 outputs of one block of 32 columns. codes: of eight groups of four columns, `step` vectors apart; s, m: scale and
/// minimum of the outputs' block in each column.
LACUNA_INLINE void put_panel(const U32x16* codes, int step, const float* s, const float* m, uint8_t* out,
                             uint8_t* scales) {
  F32x16 w[32], top = splat(0.0f);
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    const U32x16 four = codes[q * step];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const int k = 4 * q + c;
      w[k] = mul_add(to_f32((four >> (8 * c)) & 255u), splat(s[k]), splat(-m[k]));
      for (int i = 0; i < kRegs; ++i) {
        const RegF magnitude = (RegF)((RegU)w[k].reg[i] & (RegU)splat_reg(0x7fffffff));
        top.reg[i] = magnitude > top.reg[i] ? magnitude : top.reg[i];
      }
    }
  }
  const F32x16 by = put_scales(top, scales);
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    U32x16 packed = {};
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      // 128.0 + code as the low byte of the sum's bits
      const F32x16 rounded = mul_add(w[4 * q + c], by, splat(0x1.8p23f + 128));
      U32x16 bits;
      for (int i = 0; i < kRegs; ++i) bits.reg[i] = (RegU)rounded.reg[i];
      packed = packed | ((bits & 255u) << (8 * c));
    }
    store_u32(out + 64 * q, packed);
  }
}

/// Panels of 16 outputs as linear_panels.cc lays out q8_0: [K/32][512] codes + 128, then [K/32][16] f16 scales.
template <class L>
static void to_panels(const ZigzagRun& run, int64_t r, int64_t K, std::byte* panels) {
  constexpr int kWidth = 256 / L::kBlocks, kFloats = 4 * L::kBlocks;
  const int64_t blocks = (K + 31) / 32, panel = odd_lines(blocks * (512 + 32));
  alignas(64) static const uint8_t kZeros[512] = {};
  alignas(64) static const float kOnes[4] = {1, 1, 1, 1};
  for (int64_t block = 0; block < blocks; ++block) {
    const uint8_t* p[32];
    for (int c = 0; c < 32; ++c) {
      const int64_t k = block * 32 + c;
      p[c] = k < K ? reinterpret_cast<const uint8_t*>(run.base) + k * run.stride + r * L::kBytes : kZeros;
    }
    alignas(64) float s[L::kBlocks][32], m[L::kBlocks][32];
    for (int q = 0; q < 8; ++q) {
      alignas(64) float scale[kFloats], min[kFloats] = {};  // [blocks, columns]
      factors4<L>(p + 4 * q, kOnes, scale, min);
      for (int b = 0; b < L::kBlocks; ++b) {
        __builtin_memcpy(&s[b][4 * q], scale + 4 * b, 16);
        __builtin_memcpy(&m[b][4 * q], min + 4 * b, 16);
      }
    }
    const auto groups = [&]<int kPass>() {
      U32x16 codes[8][2][4];  // [groups of columns][groups of outputs][lanes]
      for (int q = 0; q < 8; ++q) {
        U32x16 vectors[2][4];
        L::template codes<kPass, false>(p + 4 * q, vectors);
        for (int g = 0; g < 2; ++g) transpose_lanes(vectors[g], codes[q][g]);
      }
      for (int g = 0; g < 2; ++g) {
        for (int l = 0; l < 4; ++l) {
          const int output = L::out(2 * kPass + g, l), b = output / kWidth;
          auto* at = reinterpret_cast<uint8_t*>(panels + output / 16 * panel);
          put_panel(&codes[0][g][l], 8, s[b], m[b], at + block * 512, at + blocks * 512 + block * 32);
        }
      }
    };
    groups.template operator()<0>();
    groups.template operator()<1>();
  }
}

}  // namespace lacuna::cpu::LACUNA_ISA
