// src/kernels/cpu/isa/zigzag_codes.h - what the zigzag kernels know of each stored superblock.
//
// A superblock's codes are four groups of 64 outputs. Four columns' codes of a group are four vectors of 16 dwords,
// vector j: lane 4l + i holds the four columns' codes of output L::out(group, l) + 4j + i. weight = s[b] * code - m[b]
// with b the block of the output.
#pragma once

#include "kernels/cpu/isa/linear_vec.h"
#include "layout/layout.h"
#include "layout/six_bit.h"

namespace lacuna::cpu::LACUNA_ISA {

/// A vector of bytes as wide as a register, and its halves-of-lanes operations.
typedef uint8_t RegB __attribute__((vector_size(kRegBytes)));

LACUNA_INLINE RegU unpack_low8(RegU a, RegU b) {
#if defined(__AVX512BW__)
  return (RegU)_mm512_maskz_unpacklo_epi8(~__mmask64{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (RegU)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
#else
  return (RegU)__builtin_shufflevector((RegB)a, (RegB)b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#endif
}
LACUNA_INLINE RegU unpack_high8(RegU a, RegU b) {
#if defined(__AVX512BW__)
  return (RegU)_mm512_maskz_unpackhi_epi8(~__mmask64{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (RegU)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b);
#else
  return (RegU)__builtin_shufflevector((RegB)a, (RegB)b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#endif
}
LACUNA_INLINE RegU unpack_low16(RegU a, RegU b) {
#if defined(__AVX512BW__)
  return (RegU)_mm512_maskz_unpacklo_epi16(~__mmask32{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (RegU)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
#else
  return (RegU)__builtin_shufflevector((RegB)a, (RegB)b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
#endif
}
LACUNA_INLINE RegU unpack_high16(RegU a, RegU b) {
#if defined(__AVX512BW__)
  return (RegU)_mm512_maskz_unpackhi_epi16(~__mmask32{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (RegU)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#else
  return (RegU)__builtin_shufflevector((RegB)a, (RegB)b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
#endif
}

/// Bytes of four columns -> four vectors of dwords, see above.
LACUNA_INLINE void interleave(const U32x16 c[4], U32x16 out[4]) {
  for (int i = 0; i < kRegs; ++i) {
    const RegU low01 = unpack_low8(c[0].reg[i], c[1].reg[i]), high01 = unpack_high8(c[0].reg[i], c[1].reg[i]);
    const RegU low23 = unpack_low8(c[2].reg[i], c[3].reg[i]), high23 = unpack_high8(c[2].reg[i], c[3].reg[i]);
    out[0].reg[i] = unpack_low16(low01, low23);
    out[1].reg[i] = unpack_high16(low01, low23);
    out[2].reg[i] = unpack_low16(high01, high23);
    out[3].reg[i] = unpack_high16(high01, high23);
  }
}
LACUNA_INLINE void load_columns(const uint8_t* const p[4], int offset, U32x16 out[4]) {
  U32x16 c[4];
  for (int i = 0; i < 4; ++i) c[i] = load_u32(p[i] + offset);
  interleave(c, out);
}
/// 32 bytes from a, then 32 from b.
LACUNA_INLINE U32x16 load_two(const void* a, const void* b) {
  U32x16 out;
#if defined(__AVX512BW__)
  __builtin_memcpy(&out, a, 32);
  __builtin_memcpy(reinterpret_cast<char*>(&out) + 32, b, 32);
#else
  for (int i = 0; i < kRegs / 2; ++i) {
    __builtin_memcpy(&out.reg[i], static_cast<const char*>(a) + i * kRegBytes, kRegBytes);
    __builtin_memcpy(&out.reg[kRegs / 2 + i], static_cast<const char*>(b) + i * kRegBytes, kRegBytes);
  }
#endif
  return out;
}
/// 32 bytes twice.
LACUNA_INLINE U32x16 load_twice(const void* p) {
#if defined(__AVX512BW__)
  __m256i half;
  __builtin_memcpy(&half, p, 32);
  U32x16 out;
  out.reg[0] = (RegU)_mm512_maskz_broadcast_i64x4(__mmask8(0xff), half);
  return out;
#else
  return load_two(p, p);
#endif
}
LACUNA_INLINE void load_columns_twice(const uint8_t* const p[4], int offset, U32x16 out[4]) {
  U32x16 c[4];
  for (int i = 0; i < 4; ++i) c[i] = load_twice(p[i] + offset);
  interleave(c, out);
}
/// Shifts the first 32 bytes right by `a` bits a dword, the last 32 by `b`.
LACUNA_INLINE U32x16 shift_halves(const U32x16& v, int a, int b) {
  U32x16 out;
#if defined(__AVX512BW__)
  const RegU counts = {(uint32_t)a, (uint32_t)a, (uint32_t)a, (uint32_t)a, (uint32_t)a, (uint32_t)a,
                       (uint32_t)a, (uint32_t)a, (uint32_t)b, (uint32_t)b, (uint32_t)b, (uint32_t)b,
                       (uint32_t)b, (uint32_t)b, (uint32_t)b, (uint32_t)b};
  out.reg[0] = v.reg[0] >> counts;
#else
  for (int i = 0; i < kRegs; ++i) out.reg[i] = v.reg[i] >> (i < kRegs / 2 ? a : b);
#endif
  return out;
}

/// Two of the four groups at a time: pass 0 gives groups 0 and 1, pass 1 groups 2 and 3. Raw codes of the second group
/// are kRawScale times the codes, which saves a shift. kSixBit: scales and minima are six-bit numbers.
struct Zz4K {
  static constexpr layout::Id kId = layout::Id::zz4_k;
  static constexpr int kBytes = 144, kBlocks = 8, kMaxCode = 15;
  static constexpr bool kSixBit = true;
  static constexpr int kRawScale = 16;
  static constexpr int out(int group, int l) {
    return 128 * (group / 2) + 64 * (l / 2) + 32 * (group % 2) + 16 * (l % 2);
  }
  template <int kPass, bool kRaw>
  LACUNA_INLINE void codes(const uint8_t* const p[4], U32x16 u[2][4]) {
    U32x16 raw[4];
    load_columns(p, 16 + 64 * kPass, raw);
    for (int j = 0; j < 4; ++j) {
      u[0][j] = raw[j] & 0x0f0f0f0fu;
      u[1][j] = kRaw ? raw[j] & 0xf0f0f0f0u : (raw[j] >> 4) & 0x0f0f0f0fu;
    }
  }
  LACUNA_INLINE void header(const uint8_t* p, float* s, float* m) {
    uint16_t d[2];
    __builtin_memcpy(d, p, 4);
    const float scale = half_to_float(d[0]), min = half_to_float(d[1]);
    for (int b = 0; b < 8; ++b) {
      const layout::ScaleMin sm = layout::unpack_six_bit(p + 4, b);
      s[b] = scale * float(sm.scale);
      m[b] = min * float(sm.min);
    }
  }
};

struct Zz5K {
  static constexpr layout::Id kId = layout::Id::zz5_k;
  static constexpr int kBytes = 176, kBlocks = 8, kMaxCode = 31;
  static constexpr bool kSixBit = true;
  static constexpr int kRawScale = 1;
  static constexpr int out(int group, int l) { return Zz4K::out(group, l); }
  template <int kPass, bool>
  LACUNA_INLINE void codes(const uint8_t* const p[4], U32x16 u[2][4]) {
    U32x16 raw[4], high[4];
    load_columns(p, 48 + 64 * kPass, raw);
    load_columns_twice(p, 16, high);
    for (int j = 0; j < 4; ++j) {
      u[0][j] = (raw[j] & 0x0f0f0f0fu) | ((shift_halves(high[j], 4 * kPass, 4 * kPass + 2) & 0x01010101u) << 4);
      u[1][j] =
          ((raw[j] >> 4) & 0x0f0f0f0fu) | ((shift_halves(high[j], 4 * kPass + 1, 4 * kPass + 3) & 0x01010101u) << 4);
    }
  }
  LACUNA_INLINE void header(const uint8_t* p, float* s, float* m) { Zz4K::header(p, s, m); }
};

struct Zz6K {
  static constexpr layout::Id kId = layout::Id::zz6_k;
  static constexpr int kBytes = 210, kBlocks = 16, kMaxCode = 63;
  static constexpr bool kSixBit = false;
  static constexpr int kRawScale = 1;
  static constexpr int out(int group, int l) { return 64 * group + 16 * l; }
  template <int kPass, bool>
  LACUNA_INLINE void codes(const uint8_t* const p[4], U32x16 u[2][4]) {
    U32x16 raw[4], high[4];
    load_columns(p, 64 * kPass, raw);
    load_columns_twice(p, 128 + 32 * kPass, high);
    for (int j = 0; j < 4; ++j) {
      u[0][j] = (raw[j] & 0x0f0f0f0fu) | ((shift_halves(high[j], 0, 2) & 0x03030303u) << 4);
      u[1][j] = ((raw[j] >> 4) & 0x0f0f0f0fu) | ((shift_halves(high[j], 4, 6) & 0x03030303u) << 4);
    }
  }
  LACUNA_INLINE void header(const uint8_t* p, float* s, float* m) {
    uint16_t d;
    int8_t scale[16];
    __builtin_memcpy(&d, p + 208, 2);
    __builtin_memcpy(scale, p + 192, 16);
    const float unit = half_to_float(d);
    for (int b = 0; b < 16; ++b) {
      s[b] = unit * float(scale[b]);
      m[b] = 32 * s[b];
    }
  }
};

struct Zz2K {
  static constexpr layout::Id kId = layout::Id::zz2_k;
  static constexpr int kBytes = 84, kBlocks = 16, kMaxCode = 3;
  static constexpr bool kSixBit = false;
  static constexpr int kRawScale = 1;
  static constexpr int out(int group, int l) { return 128 * (l / 2) + 32 * group + 16 * (l % 2); }
  template <int kPass, bool>
  LACUNA_INLINE void codes(const uint8_t* const p[4], U32x16 u[2][4]) {
    U32x16 raw[4];
    load_columns(p, 16, raw);
    for (int j = 0; j < 4; ++j) {
      u[0][j] = (raw[j] >> (4 * kPass)) & 0x03030303u;
      u[1][j] = (raw[j] >> (4 * kPass + 2)) & 0x03030303u;
    }
  }
  LACUNA_INLINE void header(const uint8_t* p, float* s, float* m) {
    uint16_t d[2];
    __builtin_memcpy(d, p + 80, 4);
    const float scale = half_to_float(d[0]), min = half_to_float(d[1]);
    for (int b = 0; b < 16; ++b) {
      s[b] = scale * float(p[b] & 15);
      m[b] = min * float(p[b] >> 4);
    }
  }
};

struct Zz3K {
  static constexpr layout::Id kId = layout::Id::zz3_k;
  static constexpr int kBytes = 110, kBlocks = 16, kMaxCode = 7;
  static constexpr bool kSixBit = false;
  static constexpr int kRawScale = 1;
  static constexpr int out(int group, int l) { return Zz2K::out(group, l); }
  template <int kPass, bool>
  LACUNA_INLINE void codes(const uint8_t* const p[4], U32x16 u[2][4]) {
    U32x16 raw[4], high[4];
    load_columns(p, 32, raw);
    load_columns_twice(p, 0, high);
    for (int j = 0; j < 4; ++j) {
      u[0][j] = ((raw[j] >> (4 * kPass)) & 0x03030303u) |
                ((shift_halves(high[j], 2 * kPass, 4 + 2 * kPass) & 0x01010101u) << 2);
      u[1][j] = ((raw[j] >> (4 * kPass + 2)) & 0x03030303u) |
                ((shift_halves(high[j], 2 * kPass + 1, 5 + 2 * kPass) & 0x01010101u) << 2);
    }
  }
  LACUNA_INLINE void header(const uint8_t* p, float* s, float* m) {
    uint16_t d;
    __builtin_memcpy(&d, p + 108, 2);
    const float unit = half_to_float(d);
    const uint8_t* bits = p + 96;
    for (int b = 0; b < 16; ++b) {
      const int scale = ((bits[b % 8] >> (b < 8 ? 0 : 4)) & 15) | ((bits[8 + b % 4] >> (b / 4 * 2)) & 3) << 4;
      s[b] = unit * float(scale - 32);
      m[b] = 4 * s[b];
    }
  }
};

struct Zz8 {
  static constexpr layout::Id kId = layout::Id::zz8;
  static constexpr int kBytes = 272, kBlocks = 8, kMaxCode = 255;
  static constexpr bool kSixBit = false;
  static constexpr int kRawScale = 1;
  static constexpr int out(int group, int l) { return 64 * group + 16 * l; }
  template <int kPass, bool>
  LACUNA_INLINE void codes(const uint8_t* const p[4], U32x16 u[2][4]) {
    for (int g = 0; g < 2; ++g) {
      const int at = 2 + 34 * (4 * kPass + 2 * g);
      U32x16 c[4];
      for (int i = 0; i < 4; ++i) c[i] = load_two(p[i] + at, p[i] + at + 34);
      interleave(c, u[g]);
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < kRegs; ++i) u[g][j].reg[i] ^= (RegU)splat_reg(int32_t(0x80808080u));
    }
  }
  LACUNA_INLINE void header(const uint8_t* p, float* s, float* m) {
    for (int b = 0; b < 8; ++b) {
      uint16_t d;
      __builtin_memcpy(&d, p + 34 * b, 2);
      s[b] = half_to_float(d);
      m[b] = 128 * s[b];
    }
  }
};

/// Four floats, four times.
LACUNA_INLINE F32x16 repeat_four(const float* p) {
#if defined(__AVX512BW__)
  return {{(RegF)_mm512_maskz_broadcast_f32x4(__mmask16(0xffff), _mm_loadu_ps(p))}};
#elif defined(__AVX2__)
  const auto eight = (RegF)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {{eight, eight}};
#else
  RegF four;
  __builtin_memcpy(&four, p, 16);
  return {{four, four, four, four}};
#endif
}

/// Factors of four columns: factor[4 b + c] = x[c] * s[b] of column c; mins[4 b + c] += x[c] * m[b].
template <class L>
LACUNA_INLINE void factors4(const uint8_t* const p[4], const float* x, float* factor, float* mins) {
  for (int c = 0; c < 4; ++c) {
    float s[L::kBlocks], m[L::kBlocks];
    L::header(p[c], s, m);
    for (int b = 0; b < L::kBlocks; ++b) {
      factor[4 * b + c] = x[c] * s[b];
      mins[4 * b + c] += x[c] * m[b];
    }
  }
}

#if defined(__AVX512BW__)
// The headers of four columns lie in the four 128-bit lanes of a register; the bytes are then put in the order (block,
// column), so that one factor x * d per column repeats every four lanes.

LACUNA_INLINE __m512i load_lanes(const uint8_t* const p[4], int offset) {
  const auto lane = [&](int c) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p[c] + offset)); };
  __m512i v = _mm512_maskz_broadcast_i32x4(__mmask16(0x000f), lane(0));
  v = _mm512_mask_broadcast_i32x4(v, __mmask16(0x00f0), lane(1));
  v = _mm512_mask_broadcast_i32x4(v, __mmask16(0x0f00), lane(2));
  return _mm512_mask_broadcast_i32x4(v, __mmask16(0xf000), lane(3));
}
/// Lane c, dword q, byte i -> byte 16 q + 4 i + c.
LACUNA_INLINE __m512i blocks_first(__m512i v) {
  const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  return _mm512_maskz_shuffle_epi8(~__mmask64{0}, _mm512_maskz_permutexvar_epi32(__mmask16(0xffff), dwords, v), bytes);
}
template <int kLane>
LACUNA_INLINE __m512 unsigned_lane(__m512i v) {
  const __m128i sixteen = _mm512_maskz_extracti32x4_epi32(__mmask8(0xf), v, kLane);
  return _mm512_maskz_cvtepi32_ps(__mmask16(0xffff), _mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), sixteen));
}
/// body.operator()<q>() for the four lanes.
template <class Body>
LACUNA_INLINE void each_lane(const Body& body) {
  body.template operator()<0>();
  body.template operator()<1>();
  body.template operator()<2>();
  body.template operator()<3>();
}
LACUNA_INLINE __m512 repeat4(__m128 v) { return _mm512_maskz_broadcast_f32x4(__mmask16(0xffff), v); }
LACUNA_INLINE void add_product(float* sums, __m512 a, __m512 b) {
  _mm512_storeu_ps(sums, _mm512_fmadd_ps(a, b, _mm512_loadu_ps(sums)));
}
/// d and dmin, f16 side by side, of four columns at p[c] + offset.
LACUNA_INLINE void scales4(const uint8_t* const p[4], int offset, const float* x, __m512& d, __m512& dmin) {
  int32_t both[4];
  for (int c = 0; c < 4; ++c) __builtin_memcpy(&both[c], p[c] + offset, 4);
  const __m128i pairs = _mm_setr_epi32(both[0], both[1], both[2], both[3]);
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256 values = _mm256_cvtph_ps(_mm_shuffle_epi8(pairs, order));
  const __m128 inputs = _mm_loadu_ps(x);
  d = repeat4(_mm_mul_ps(_mm256_castps256_ps128(values), inputs));
  dmin = repeat4(_mm_mul_ps(_mm256_extractf128_ps(values, 1), inputs));
}

/// Six-bit numbers of four columns whose headers lie in the lanes of `head` (d dmin | u0 | u1 | u2): [16, 4] bytes,
/// eight blocks' scales and then their minima.
LACUNA_INLINE __m512i six_bit_numbers(__m512i head) {
  const __m512i first = _mm512_maskz_shuffle_epi32(__mmask16(0xffff), head, _MM_PERM_ENUM(_MM_SHUFFLE(3, 2, 3, 1)));
  const __m512i top = _mm512_maskz_shuffle_epi32(__mmask16(0xffff), head, _MM_PERM_ENUM(_MM_SHUFFLE(2, 0, 1, 0)));
  const __m512i low = _mm512_maskz_and_epi32(
      __mmask16(0xffff), _mm512_maskz_srlv_epi32(__mmask16(0xffff), first, _mm512_set4_epi32(4, 0, 0, 0)),
      _mm512_set4_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f));
  const __m512i high = _mm512_maskz_and_epi32(__mmask16(0xffff), _mm512_maskz_srli_epi32(__mmask16(0xffff), top, 2),
                                              _mm512_set4_epi32(0x30303030, 0, 0x30303030, 0));
  return blocks_first(_mm512_or_si512(low, high));
}
LACUNA_INLINE void six_bit_factors(const uint8_t* const p[4], const float* x, float* factor, float* mins) {
  const __m512i bytes = six_bit_numbers(load_lanes(p, 0));
  __m512 d, dmin;
  scales4(p, 0, x, d, dmin);
  _mm512_storeu_ps(factor, _mm512_mul_ps(unsigned_lane<0>(bytes), d));
  _mm512_storeu_ps(factor + 16, _mm512_mul_ps(unsigned_lane<1>(bytes), d));
  add_product(mins, unsigned_lane<2>(bytes), dmin);
  add_product(mins + 16, unsigned_lane<3>(bytes), dmin);
}
template <>
inline __attribute__((always_inline)) void factors4<Zz4K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  six_bit_factors(p, x, factor, mins);
}
template <>
inline __attribute__((always_inline)) void factors4<Zz5K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  six_bit_factors(p, x, factor, mins);
}
template <>
inline __attribute__((always_inline)) void factors4<Zz2K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  const __m512i both = load_lanes(p, 0), nibble = _mm512_set1_epi8(15);
  const __m512i scale = blocks_first(_mm512_and_si512(both, nibble));
  const __m512i min = blocks_first(_mm512_and_si512(_mm512_maskz_srli_epi16(~__mmask32{0}, both, 4), nibble));
  __m512 d, dmin;
  scales4(p, 80, x, d, dmin);
  each_lane([&]<int q>() {
    _mm512_storeu_ps(factor + 16 * q, _mm512_mul_ps(unsigned_lane<q>(scale), d));
    add_product(mins + 16 * q, unsigned_lane<q>(min), dmin);
  });
}
/// Layouts without minima: weight = s * (code - offset).
LACUNA_INLINE __m512 scale_only4(const uint8_t* const p[4], int offset, const float* x) {
  uint16_t d[4];
  for (int c = 0; c < 4; ++c) __builtin_memcpy(&d[c], p[c] + offset, 2);
  __m128i halves;
  uint64_t all;
  __builtin_memcpy(&all, d, 8);
  halves = _mm_cvtsi64_si128(int64_t(all));
  return repeat4(_mm_mul_ps(_mm_cvtph_ps(halves), _mm_loadu_ps(x)));
}
template <>
inline __attribute__((always_inline)) void factors4<Zz6K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  const __m512i flipped = _mm512_xor_si512(load_lanes(p, 192), _mm512_set1_epi8(int8_t(0x80)));
  const __m512i scale = blocks_first(flipped);
  const __m512 d = scale_only4(p, 208, x), offset = _mm512_set1_ps(32), bias = _mm512_set1_ps(128);
  each_lane([&]<int q>() {
    const __m512 f = _mm512_mul_ps(_mm512_sub_ps(unsigned_lane<q>(scale), bias), d);
    _mm512_storeu_ps(factor + 16 * q, f);
    add_product(mins + 16 * q, f, offset);
  });
}
template <>
inline __attribute__((always_inline)) void factors4<Zz3K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  // Lane: u0 u1 u2 d... ; scale dword q = nibbles of u[q % 2], shifted 4 for q >= 2, and bits 2q of u2.
  const __m512i head = load_lanes(p, 94);  // 2 bytes before the scales, so that the load ends with the superblock
  const __m512i at = _mm512_maskz_alignr_epi8(~__mmask64{0}, _mm512_setzero_si512(), head, 2);
  const __m512i nibbles = _mm512_maskz_srlv_epi32(
      __mmask16(0xffff), _mm512_maskz_shuffle_epi32(__mmask16(0xffff), at, _MM_PERM_ENUM(_MM_SHUFFLE(1, 0, 1, 0))),
      _mm512_set4_epi32(4, 4, 0, 0));
  const __m512i pairs = _mm512_maskz_srlv_epi32(
      __mmask16(0xffff), _mm512_maskz_shuffle_epi32(__mmask16(0xffff), at, _MM_PERM_ENUM(_MM_SHUFFLE(2, 2, 2, 2))),
      _mm512_set4_epi32(6, 4, 2, 0));
  const __m512i bits =
      _mm512_or_si512(_mm512_and_si512(nibbles, _mm512_set1_epi8(15)),
                      _mm512_maskz_slli_epi32(__mmask16(0xffff), _mm512_and_si512(pairs, _mm512_set1_epi8(3)), 4));
  const __m512i scale = blocks_first(bits);
  const __m512 d = scale_only4(p, 108, x), four = _mm512_set1_ps(4), bias = _mm512_set1_ps(32);
  each_lane([&]<int q>() {
    const __m512 f = _mm512_mul_ps(_mm512_sub_ps(unsigned_lane<q>(scale), bias), d);
    _mm512_storeu_ps(factor + 16 * q, f);
    add_product(mins + 16 * q, f, four);
  });
}
#elif defined(__AVX2__)
/// Bytes of four columns: byte 4 i + c of out[q] = byte 4 q + i of column c.
LACUNA_INLINE void blocks_first(const __m128i columns[4], __m128i out[4]) {
  const __m128i low01 = _mm_unpacklo_epi8(columns[0], columns[1]), high01 = _mm_unpackhi_epi8(columns[0], columns[1]);
  const __m128i low23 = _mm_unpacklo_epi8(columns[2], columns[3]), high23 = _mm_unpackhi_epi8(columns[2], columns[3]);
  out[0] = _mm_unpacklo_epi16(low01, low23);
  out[1] = _mm_unpackhi_epi16(low01, low23);
  out[2] = _mm_unpacklo_epi16(high01, high23);
  out[3] = _mm_unpackhi_epi16(high01, high23);
}
LACUNA_INLINE __m256 unsigned_floats(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }
LACUNA_INLINE __m256 signed_floats(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
/// factor: [4 blocks, 4 columns] = 16 numbers * d.
LACUNA_INLINE void put_factors(__m256 low, __m256 high, __m256 d, float* factor) {
  _mm256_storeu_ps(factor, _mm256_mul_ps(low, d));
  _mm256_storeu_ps(factor + 8, _mm256_mul_ps(high, d));
}
LACUNA_INLINE void add_mins(__m256 low, __m256 high, __m256 d, float* mins) {
  _mm256_storeu_ps(mins, _mm256_fmadd_ps(low, d, _mm256_loadu_ps(mins)));
  _mm256_storeu_ps(mins + 8, _mm256_fmadd_ps(high, d, _mm256_loadu_ps(mins + 8)));
}
/// Two f16 side by side (d, dmin) of four columns at p[c] + offset, times x, each twice.
LACUNA_INLINE void scales4(const uint8_t* const p[4], int offset, const float* x, __m256& d, __m256& dmin) {
  int32_t both[4];
  for (int c = 0; c < 4; ++c) __builtin_memcpy(&both[c], p[c] + offset, 4);
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256 values = _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_setr_epi32(both[0], both[1], both[2], both[3]), order));
  const __m256 products = _mm256_mul_ps(values, _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x)));
  d = _mm256_permute2f128_ps(products, products, 0x00);
  dmin = _mm256_permute2f128_ps(products, products, 0x11);
}

LACUNA_INLINE void six_bit_factors(const uint8_t* const p[4], const float* x, float* factor, float* mins) {
  __m128i numbers[4], bytes[4];  // of a column: scales 0..7, then minima
  for (int c = 0; c < 4; ++c) {
    const __m128i head = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p[c]));  // d dmin | u0 | u1 | u2
    const __m128i low =
        _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1)), _mm_setr_epi32(0, 0, 0, 4)),
                      _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    const __m128i high = _mm_and_si128(_mm_srli_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(2, 0, 1, 0)), 2),
                                       _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    numbers[c] = _mm_or_si128(low, high);
  }
  blocks_first(numbers, bytes);
  __m256 d, dmin;
  scales4(p, 0, x, d, dmin);
  for (int q = 0; q < 2; ++q) {
    put_factors(unsigned_floats(bytes[q]), unsigned_floats(_mm_srli_si128(bytes[q], 8)), d, factor + 16 * q);
    add_mins(unsigned_floats(bytes[q + 2]), unsigned_floats(_mm_srli_si128(bytes[q + 2], 8)), dmin, mins + 16 * q);
  }
}
template <>
inline __attribute__((always_inline)) void factors4<Zz4K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  six_bit_factors(p, x, factor, mins);
}
template <>
inline __attribute__((always_inline)) void factors4<Zz5K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  six_bit_factors(p, x, factor, mins);
}
template <>
inline __attribute__((always_inline)) void factors4<Zz2K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  __m128i scale[4], min[4];
  for (int c = 0; c < 4; ++c) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p[c])), nibble = _mm_set1_epi8(15);
    scale[c] = _mm_and_si128(both, nibble);
    min[c] = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
  }
  __m128i scales[4], minima[4];
  blocks_first(scale, scales);
  blocks_first(min, minima);
  __m256 d, dmin;
  scales4(p, 80, x, d, dmin);
  for (int q = 0; q < 4; ++q) {
    put_factors(unsigned_floats(scales[q]), unsigned_floats(_mm_srli_si128(scales[q], 8)), d, factor + 16 * q);
    add_mins(unsigned_floats(minima[q]), unsigned_floats(_mm_srli_si128(minima[q], 8)), dmin, mins + 16 * q);
  }
}
template <>
inline __attribute__((always_inline)) void factors4<Zz6K>(const uint8_t* const p[4], const float* x, float* factor,
                                                          float* mins) {
  __m128i scale[4], scales[4];
  uint16_t d[4];
  for (int c = 0; c < 4; ++c) {
    scale[c] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p[c] + 192));
    __builtin_memcpy(&d[c], p[c] + 208, 2);
  }
  blocks_first(scale, scales);
  uint64_t halves;
  __builtin_memcpy(&halves, d, 8);
  const __m128 products = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi64_si128(int64_t(halves))), _mm_loadu_ps(x));
  const __m256 unit = _mm256_set_m128(products, products), offset = _mm256_set1_ps(32);
  for (int q = 0; q < 4; ++q) {
    float* at = factor + 16 * q;
    put_factors(signed_floats(scales[q]), signed_floats(_mm_srli_si128(scales[q], 8)), unit, at);
    add_mins(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8), offset, mins + 16 * q);
  }
}
#endif

}  // namespace lacuna::cpu::LACUNA_ISA
