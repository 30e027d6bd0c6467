// src/kernels/cpu/isa/zigzag_round.h - factors x * scale of a chunk of columns, rounded to 16 bits in two bytes.
#pragma once

#include <algorithm>

#include "kernels/cpu/isa/zigzag_codes.h"
#include "kernels/cpu/zigzag_kernel.h"

namespace lacuna::cpu::LACUNA_ISA {

constexpr int kQuads = int(kZigzagMostColumns / 4);  // groups of four columns in a chunk
constexpr float kLowUnit = 256;                      // steps in one unit of the high byte

/// The chunk's factors of one superblock row, rounded: dwords of four columns' bytes.
template <class L>
struct Rounded {
  alignas(64) int32_t bytes[kQuads][2 * L::kBlocks];  // by Places::of()
  alignas(64) float step[16];                         // of the first L::kBlocks
};

/// Where the dword of a block's high (plane 0) or low bytes (plane 1) lies.
struct PackedPlaces {  // as two packings of 32-bit steps leave them
  static constexpr int of(int block, int plane) {
    return 16 * (block / 8) + 4 * (block % 4) + 2 * plane + block / 4 % 2;
  }
};
struct OrderedPlaces {  // pairs of blocks, in order
  static constexpr int of(int block, int plane) { return 4 * (block / 2) + 2 * plane + block % 2; }
};

/// In each 128-bit lane dwords[at[lane]].
template <int a0, int a1, int a2, int a3>
LACUNA_INLINE I32x16 spread_lanes(const int32_t* dwords) {
  I32x16 out;
#if defined(__AVX512BW__)
  const __m512i lanes = _mm512_setr_epi32(a0, a0, a0, a0, a1, a1, a1, a1, a2, a2, a2, a2, a3, a3, a3, a3);
  constexpr int kFirst = std::min({a0, a1, a2, a3}), kLast = std::max({a0, a1, a2, a3});
  if constexpr (kFirst / 16 == kLast / 16) {  // permutexvar looks at the low four bits of an index
    const __m512i all = _mm512_load_si512(dwords + 16 * (kFirst / 16));
    out.reg[0] = (RegI)_mm512_maskz_permutexvar_epi32(__mmask16(0xffff), lanes, all);
  } else {
    out.reg[0] = (RegI)_mm512_permutex2var_epi32(_mm512_load_si512(dwords), lanes, _mm512_load_si512(dwords + 16));
  }
#elif defined(__AVX2__)
  const auto pair = [](int32_t a, int32_t b) { return (RegI)_mm256_setr_m128i(_mm_set1_epi32(a), _mm_set1_epi32(b)); };
  out.reg[0] = pair(dwords[a0], dwords[a1]);
  out.reg[1] = pair(dwords[a2], dwords[a3]);
#else
  out.reg[0] = splat_reg(dwords[a0]);
  out.reg[1] = splat_reg(dwords[a1]);
  out.reg[2] = splat_reg(dwords[a2]);
  out.reg[3] = splat_reg(dwords[a3]);
#endif
  return out;
}

/// The block of outputs in a lane of a group.
template <class L>
LACUNA_INLINE constexpr int block_of(int group, int lane) {
  return L::out(group, lane) / (256 / L::kBlocks);
}

/// In each lane the dword of that lane's block of outputs.
template <class L, class Places, int kGroup, int kPlane>
LACUNA_INLINE I32x16 factors_of(const int32_t* dwords) {
  return spread_lanes<Places::of(block_of<L>(kGroup, 0), kPlane), Places::of(block_of<L>(kGroup, 1), kPlane),
                      Places::of(block_of<L>(kGroup, 2), kPlane), Places::of(block_of<L>(kGroup, 3), kPlane)>(dwords);
}

/// In each lane the step of that lane's block of outputs.
template <class L, int kGroup>
LACUNA_INLINE F32x16 steps_of(const float* step) {
  alignas(64) int32_t bits[16];
  __builtin_memcpy(bits, step, 64);
  const I32x16 lanes =
      spread_lanes<block_of<L>(kGroup, 0), block_of<L>(kGroup, 1), block_of<L>(kGroup, 2), block_of<L>(kGroup, 3)>(
          bits);
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = (RegF)lanes.reg[i];
  return out;
}

/// Rounds a chunk's factors, [quads][4 blocks columns] floats, against the largest of each block.
template <class L>
LACUNA_INLINE void round_factors(const float* factor, int quads, Rounded<L>& out) {
  constexpr int kVectors = L::kBlocks / 4;  // of 4 blocks x 4 columns
  F32x16 inverse[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    // Magnitudes compare as integers; a NaN is the largest.
    RegU top[kRegs] = {};
    for (int q = 0; q < quads; ++q) {
      const U32x16 bits = load_u32(factor + q * 4 * L::kBlocks + 16 * v);
      for (int i = 0; i < kRegs; ++i) {
        const RegU magnitude = bits.reg[i] & (RegU)splat_reg(0x7fffffff);
#if defined(__AVX512BW__)
        top[i] = (RegU)_mm512_maskz_max_epu32(__mmask16(0xffff), (__m512i)top[i], (__m512i)magnitude);
#else
        const RegU larger = (RegU)((RegI)magnitude > (RegI)top[i]);
        top[i] = (magnitude & larger) | (top[i] & ~larger);
#endif
      }
    }
#if defined(__AVX512BW__)
    const auto of_block = [](__m512i m) {  // the largest of each four lanes, in all four
      m = _mm512_maskz_max_epu32(__mmask16(0xffff), m, _mm512_maskz_shuffle_epi32(__mmask16(0xffff), m, _MM_PERM_CDAB));
      return _mm512_maskz_max_epu32(__mmask16(0xffff), m,
                                    _mm512_maskz_shuffle_epi32(__mmask16(0xffff), m, _MM_PERM_BADC));
    };
    const __m512i bits = of_block((__m512i)top[0]);
    const __m512 magnitude = (__m512)bits, steps_ps = _mm512_set1_ps(kZigzagSteps);
    const __mmask16 bad = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(0x7f800000));
    const __mmask16 counts = _mm512_cmpge_epu32_mask(bits, (__m512i)_mm512_set1_ps(0x1p-110f)) & ~bad;
    __m512 step = _mm512_maskz_div_ps(counts, magnitude, steps_ps);
    step = _mm512_mask_mov_ps(step, bad, _mm512_set1_ps(__builtin_nanf("")));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(
        out.step + 4 * v,
        _mm512_maskz_extractf32x4_ps(__mmask8(0xf), _mm512_maskz_permutexvar_ps(__mmask16(0xffff), firsts, step), 0));
    inverse[v] = {{(RegF)_mm512_maskz_div_ps(counts, steps_ps, magnitude)}};
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i) {
      __m256i bits = _mm256_max_epu32((__m256i)top[i], _mm256_shuffle_epi32((__m256i)top[i], 0xb1));
      bits = _mm256_max_epu32(bits, _mm256_shuffle_epi32(bits, 0x4e));  // the largest of each four lanes, in all four
      const __m256 magnitude = (__m256)bits, steps_ps = _mm256_set1_ps(kZigzagSteps);
      const __m256 bad = (__m256)_mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x7f7fffff));
      const __m256 counts = _mm256_andnot_ps(bad, _mm256_cmp_ps(magnitude, _mm256_set1_ps(0x1p-110f), _CMP_GE_OQ));
      const __m256 step = _mm256_or_ps(_mm256_and_ps(counts, _mm256_div_ps(magnitude, steps_ps)),
                                       _mm256_and_ps(bad, _mm256_set1_ps(__builtin_nanf(""))));
      out.step[4 * v + 2 * i] = _mm256_cvtss_f32(step);
      out.step[4 * v + 2 * i + 1] = _mm_cvtss_f32(_mm256_extractf128_ps(step, 1));
      inverse[v].reg[i] = (RegF)_mm256_and_ps(counts, _mm256_div_ps(steps_ps, magnitude));
    }
#else
    uint32_t lanes[16];
    for (int i = 0; i < kRegs; ++i) __builtin_memcpy(lanes + kLanes * i, &top[i], kRegBytes);
    float scale[16];
    for (int b = 0; b < 4; ++b) {
      uint32_t largest = 0;
      for (int c = 0; c < 4; ++c) largest = lanes[4 * b + c] > largest ? lanes[4 * b + c] : largest;
      float magnitude;
      __builtin_memcpy(&magnitude, &largest, 4);
      float by = 0, step = 0;
      if (largest >= 0x7f800000u) {
        step = __builtin_nanf("");          // a NaN or an infinity shows in every output of the block
      } else if (magnitude >= 0x1p-110f) {  // smaller ones are below any weight's effect
        by = kZigzagSteps / magnitude;
        step = magnitude / kZigzagSteps;
      }
      out.step[4 * v + b] = step;
      for (int c = 0; c < 4; ++c) scale[4 * b + c] = by;
    }
    inverse[v] = load_f32(scale);
#endif
  }
  for (int q = 0; q < quads; ++q) {
    const float* from = factor + q * 4 * L::kBlocks;
    for (int v = 0; v < kVectors; v += 2) {
      const F32x16 first = load_f32(from + 16 * v) * inverse[v], second = load_f32(from + 16 * v + 16) * inverse[v + 1];
#if defined(__AVX512BW__)
      const __m512i steps =
          _mm512_maskz_packs_epi32(~__mmask32{0}, _mm512_maskz_cvtps_epi32(__mmask16(0xffff), (__m512)first.reg[0]),
                                   _mm512_maskz_cvtps_epi32(__mmask16(0xffff), (__m512)second.reg[0]));
      const auto shift = [](__m512i v16) { return _mm512_maskz_srai_epi16(~__mmask32{0}, v16, 8); };
      const __m512i high = shift(_mm512_maskz_add_epi16(~__mmask32{0}, steps, _mm512_set1_epi16(128)));
      const __m512i low = shift(_mm512_maskz_slli_epi16(~__mmask32{0}, steps, 8));
      _mm512_store_si512(out.bytes[q] + 8 * v, _mm512_maskz_packs_epi16(~__mmask64{0}, high, low));
#elif defined(__AVX2__)
      for (int i = 0; i < 2; ++i) {
        const __m256i steps =
            _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)first.reg[i]), _mm256_cvtps_epi32((__m256)second.reg[i]));
        const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(steps, _mm256_set1_epi16(128)), 8);
        const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(steps, 8), 8);
        _mm256_store_si256(reinterpret_cast<__m256i*>(out.bytes[q] + 8 * v + 8 * i), _mm256_packs_epi16(high, low));
      }
#else
      for (int part = 0; part < 2; ++part) {
        const F32x16 rounded = (part == 0 ? first : second) + splat(0x1.8p23f);  // the integer is in the low bits
        int32_t steps[16];
        store_f32(steps, rounded);
        int8_t low[16], high[16];
        for (int i = 0; i < 16; ++i) {
          const int32_t step = steps[i] - 0x4b400000;
          low[i] = int8_t(uint8_t(step & 255));
          high[i] = int8_t((step + 128) >> 8);
        }
        for (int b = 0; b < 4; ++b) {
          __builtin_memcpy(&out.bytes[q][PackedPlaces::of(4 * (v + part) + b, 0)], high + 4 * b, 4);
          __builtin_memcpy(&out.bytes[q][PackedPlaces::of(4 * (v + part) + b, 1)], low + 4 * b, 4);
        }
      }
#endif
    }
  }
}

#if defined(__AVX512VNNI__)

/// Signed bytes (high, low) of 16-bit steps, steps = 256 high + low, as the bytes of a word: low first.
LACUNA_INLINE __m512i split_steps(__m512i steps) {
  const __m512i up = _mm512_maskz_add_epi16(~__mmask32{0}, steps, _mm512_set1_epi16(128));
  return _mm512_xor_si512(up, _mm512_set1_epi16(128));
}

template <int kHalf>
LACUNA_INLINE __m256i half_of(__m512i v) {
  return _mm512_maskz_extracti64x4_epi64(__mmask8(0xf), v, kHalf);
}
LACUNA_INLINE uint32_t largest_of(__m512i v) {
  const __m256i eight = _mm256_max_epu32(half_of<0>(v), half_of<1>(v));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}

/// A step that `top`, the bits of the largest magnitude, is `most` of, and its inverse. NaN where the largest is none
/// or infinite, so that it shows in every output; 0 where it is below any weight's effect.
LACUNA_INLINE float step_of(uint32_t top, float most, float& inverse) {
  inverse = 0;
  if (top >= 0x7f800000u) return __builtin_nanf("");
  float magnitude;
  __builtin_memcpy(&magnitude, &top, 4);
  if (magnitude < 0x1p-110f) return 0;
  inverse = most / magnitude;
  return magnitude / most;
}

/// One superblock row of a chunk where scales and minima are six-bit numbers times two floats of the superblock, d and
/// dmin: the inputs times these are rounded to 16 bits against the chunk's largest, and what follows is integers.
struct SixBitRow {
  static constexpr float kInputSteps = 32767;  // of |x d|; times a scale / 64 they leave a high byte of 126 at most
  alignas(64) uint8_t numbers[kQuads][64];     // [16, columns]: eight scales, eight minima
  alignas(64) int32_t units[4 * kQuads];       // d | dmin << 16, f16
  alignas(64) int16_t inputs[4 * kQuads];      // x * d in steps / 64
  alignas(64) int32_t min_inputs[kQuads][2];   // dwords of four columns' high and low bytes of x * dmin in min steps
  float step = 0, min_step = 0;                // a product of an input and a scale is in steps

  inline __attribute__((always_inline)) void unpack(const uint8_t* const p[4], int q) {
    const __m512i head = load_lanes(p, 0);
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm512_store_si512(numbers[q], six_bit_numbers(head));
    const __m512i both = _mm512_maskz_permutexvar_epi32(__mmask16(0xffff), firsts, head);
    _mm_store_si128(reinterpret_cast<__m128i*>(units + 4 * q), _mm256_castsi256_si128(half_of<0>(both)));
  }

  /// x: the inputs of 4 * quads columns.
  inline __attribute__((always_inline)) void round_inputs(const float* x, int quads) {
    __m512 products[2][kQuads / 4];  // x * d; x * dmin
    __m512i tops[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int v = 0; 4 * v < quads; ++v) {
      const auto some = quads - 4 * v >= 4 ? __mmask16(0xffff) : __mmask16((1 << 4 * (quads - 4 * v)) - 1);
      const __m512i both = _mm512_maskz_load_epi32(some, units + 16 * v);
      const __m512 in = _mm512_maskz_load_ps(some, x + 16 * v);
      for (int i = 0; i < 2; ++i) {
        const __m512i half = i == 0 ? both : _mm512_maskz_srli_epi32(__mmask16(0xffff), both, 16);
        const __m256i halves = _mm512_maskz_cvtepi32_epi16(__mmask16(0xffff), half);
        products[i][v] = _mm512_mul_ps(_mm512_maskz_cvtph_ps(__mmask16(0xffff), halves), in);
        const __m512i bits = _mm512_and_si512((__m512i)products[i][v], magnitude);
        tops[i] = _mm512_maskz_max_epu32(__mmask16(0xffff), tops[i], bits);
      }
    }
    float inverse, min_inverse;
    step = 64 * step_of(largest_of(tops[0]), kInputSteps, inverse);
    min_step = step_of(largest_of(tops[1]), kZigzagSteps, min_inverse);
    const __m512 inverses[2] = {_mm512_set1_ps(inverse), _mm512_set1_ps(min_inverse)};
    for (int v = 0; 4 * v < quads; ++v) {
      const auto steps = [&](int i) {
        const __m512i wide = _mm512_maskz_cvtps_epi32(__mmask16(0xffff), _mm512_mul_ps(products[i][v], inverses[i]));
        return _mm512_maskz_cvtsepi32_epi16(__mmask16(0xffff), wide);
      };
      _mm256_store_si256(reinterpret_cast<__m256i*>(inputs + 16 * v), steps(0));
      const __m128i order = _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14);
      const __m256i bytes = half_of<0>(split_steps(_mm512_castsi256_si512(steps(1))));
      _mm256_store_si256(reinterpret_cast<__m256i*>(min_inputs[4 * v]),
                         _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)));
    }
  }

  /// The factors in steps, by OrderedPlaces, and the sums of x * min added to mins.
  template <class L>
  inline __attribute__((always_inline)) void factors(int quads, Rounded<L>& out, float* mins) const {
    static_assert(L::kBlocks == 8);
    const __m512i order = _mm512_maskz_broadcast_i32x4(
        __mmask16(0xffff), _mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14));
    for (float& each : out.step) each = step;
    __m256i high = _mm256_setzero_si256(), low = high;
    for (int q = 0; q < quads; ++q) {
      const auto* of_quad = reinterpret_cast<const __m256i*>(numbers[q]);
      const __m512i scales = _mm512_maskz_slli_epi16(
          ~__mmask32{0}, _mm512_maskz_cvtepu8_epi16(~__mmask32{0}, _mm256_load_si256(of_quad)), 9);
      int64_t four;
      __builtin_memcpy(&four, inputs + 4 * q, 8);
      const __m512i steps = _mm512_maskz_mulhrs_epi16(~__mmask32{0}, _mm512_set1_epi64(four), scales);
      _mm512_store_si512(out.bytes[q], _mm512_maskz_shuffle_epi8(~__mmask64{0}, split_steps(steps), order));
      const __m256i minima = _mm256_load_si256(of_quad + 1);
      high = _mm256_dpbusd_epi32(high, minima, _mm256_set1_epi32(min_inputs[q][0]));
      low = _mm256_dpbusd_epi32(low, minima, _mm256_set1_epi32(min_inputs[q][1]));
    }
    const __m256 sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(kLowUnit), _mm256_cvtepi32_ps(low));
    const __m512 blocks = _mm512_castps256_ps512(_mm256_mul_ps(sums, _mm256_set1_ps(min_step)));
    const __m512 upper = (__m512)_mm512_maskz_shuffle_i64x2(__mmask8(0xff), (__m512i)blocks, (__m512i)blocks, 1);
    constexpr auto kFirstColumns = __mmask16(0x1111);
    _mm512_storeu_ps(mins, _mm512_add_ps(_mm512_loadu_ps(mins), _mm512_maskz_expand_ps(kFirstColumns, blocks)));
    _mm512_storeu_ps(mins + 16,
                     _mm512_add_ps(_mm512_loadu_ps(mins + 16), _mm512_maskz_expand_ps(kFirstColumns, upper)));
  }
};

#endif

}  // namespace lacuna::cpu::LACUNA_ISA
