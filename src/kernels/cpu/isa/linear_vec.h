// src/kernels/cpu/isa/linear_vec.h - 16 lanes of int32 or float on every instruction set, as one, two or four
// registers.
//
// Everything is always inlined, so that nothing outside namespace lacuna::cpu::LACUNA_ISA leaves an object file.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LACUNA_INLINE static inline __attribute__((always_inline))

namespace lacuna::cpu::LACUNA_ISA {

#if defined(__AVX512BW__)
constexpr int kRegBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegBytes = 32;
#else
constexpr int kRegBytes = 16;
#endif
constexpr int kRegs = 64 / kRegBytes;  // registers of 16 lanes
constexpr int kLanes = kRegBytes / 4;

typedef float RegF __attribute__((vector_size(kRegBytes)));
typedef int32_t RegI __attribute__((vector_size(kRegBytes)));
typedef uint32_t RegU __attribute__((vector_size(kRegBytes)));
typedef int16_t RegH __attribute__((vector_size(kRegBytes)));

struct F32x16 {
  RegF reg[kRegs];
};
struct I32x16 {
  RegI reg[kRegs];
};
/// Also 64 bytes: lane r holds 4 consecutive codes of row r, low byte first.
struct U32x16 {
  RegU reg[kRegs];
};

LACUNA_INLINE RegI splat_reg(int32_t x) {
#if defined(__AVX512BW__)
  return (RegI)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
  return RegI{x, x, x, x, x, x, x, x};
#else
  return RegI{x, x, x, x};
#endif
}
LACUNA_INLINE RegF splat_reg(float x) {
#if defined(__AVX512BW__)
  return (RegF)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return RegF{x, x, x, x, x, x, x, x};
#else
  return RegF{x, x, x, x};
#endif
}

LACUNA_INLINE F32x16 splat(float x) {
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = splat_reg(x);
  return out;
}
LACUNA_INLINE I32x16 splat(int32_t x) {
  I32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = splat_reg(x);
  return out;
}
// Register by register: compilers copy 64 bytes at once through the stack, in pieces that a register can't be read
// from.
LACUNA_INLINE F32x16 load_f32(const void* p) {
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) __builtin_memcpy(&out.reg[i], static_cast<const char*>(p) + i * kRegBytes, kRegBytes);
  return out;
}
LACUNA_INLINE void store_f32(void* p, const F32x16& v) {
  for (int i = 0; i < kRegs; ++i) __builtin_memcpy(static_cast<char*>(p) + i * kRegBytes, &v.reg[i], kRegBytes);
}
LACUNA_INLINE U32x16 load_u32(const void* p) {
  U32x16 out;
  for (int i = 0; i < kRegs; ++i) __builtin_memcpy(&out.reg[i], static_cast<const char*>(p) + i * kRegBytes, kRegBytes);
  return out;
}
LACUNA_INLINE void store_u32(void* p, const U32x16& v) {
  for (int i = 0; i < kRegs; ++i) __builtin_memcpy(static_cast<char*>(p) + i * kRegBytes, &v.reg[i], kRegBytes);
}

LACUNA_INLINE F32x16 operator+(const F32x16& a, const F32x16& b) {
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] + b.reg[i];
  return out;
}
LACUNA_INLINE F32x16 operator*(const F32x16& a, const F32x16& b) {
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] * b.reg[i];
  return out;
}
/// a * b + c; fused where the instruction set has it.
LACUNA_INLINE F32x16 mul_add(const F32x16& a, const F32x16& b, const F32x16& c) {
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) {
#if defined(__AVX512BW__)
    out.reg[i] = (RegF)_mm512_fmadd_ps((__m512)a.reg[i], (__m512)b.reg[i], (__m512)c.reg[i]);
#elif defined(__FMA__)
    out.reg[i] = (RegF)_mm256_fmadd_ps((__m256)a.reg[i], (__m256)b.reg[i], (__m256)c.reg[i]);
#else
    out.reg[i] = a.reg[i] * b.reg[i] + c.reg[i];
#endif
  }
  return out;
}
LACUNA_INLINE float reduce_add(const F32x16& v) {
  float lanes[16];
  __builtin_memcpy(lanes, &v, 64);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
LACUNA_INLINE F32x16 to_f32(const I32x16& v) {
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = __builtin_convertvector(v.reg[i], RegF);
  return out;
}
LACUNA_INLINE F32x16 to_f32(const U32x16& v) {  // for values below 2^31
  F32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = __builtin_convertvector((RegI)v.reg[i], RegF);
  return out;
}
LACUNA_INLINE U32x16 operator&(const U32x16& a, uint32_t mask) {
  U32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] & (RegU)splat_reg(int32_t(mask));
  return out;
}
LACUNA_INLINE U32x16 operator|(const U32x16& a, const U32x16& b) {
  U32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] | b.reg[i];
  return out;
}
LACUNA_INLINE U32x16 operator>>(const U32x16& a, int bits) {
  U32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] >> bits;
  return out;
}
LACUNA_INLINE U32x16 operator<<(const U32x16& a, int bits) {
  U32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] << bits;
  return out;
}

LACUNA_INLINE float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1f, mantissa = bits & 0x3ffu;
  uint32_t out;
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;
    __builtin_memcpy(&out, &magnitude, 4);
    out |= sign;
  } else {
    out = sign | ((exponent == 0x1f ? 0xffu : exponent + 112) << 23) | (mantissa << 13);
  }
  float value;
  __builtin_memcpy(&value, &out, 4);
  return value;
#endif
}
/// 16 f16 -> float, exact.
LACUNA_INLINE F32x16 load_f16(const void* p) {
  F32x16 out;
#if defined(__AVX512BW__)
  __m256i half;
  __builtin_memcpy(&half, p, 32);
  out.reg[0] = (RegF)_mm512_maskz_cvtph_ps(__mmask16(0xffff), half);
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) out.reg[i] = (RegF)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p) + i));
#else
  uint16_t half[16];
  float value[16];
  __builtin_memcpy(half, p, 32);
  for (int i = 0; i < 16; ++i) value[i] = half_to_float(half[i]);
  __builtin_memcpy(&out, value, 64);
#endif
  return out;
}
/// 16 bf16 -> float, exact.
LACUNA_INLINE F32x16 load_bf16(const void* p) {
  F32x16 out;
#if defined(__AVX512BW__)
  __m256i half;
  __builtin_memcpy(&half, p, 32);
  out.reg[0] = (RegF)((RegU)_mm512_maskz_cvtepu16_epi32(__mmask16(0xffff), half) << 16);
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    out.reg[i] = (RegF)((RegU)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p) + i)) << 16);
#else
  uint16_t half[16];
  uint32_t value[16];
  __builtin_memcpy(half, p, 32);
  for (int i = 0; i < 16; ++i) value[i] = uint32_t(half[i]) << 16;
  __builtin_memcpy(&out, value, 64);
#endif
  return out;
}
/// 16 signed bytes -> float.
LACUNA_INLINE F32x16 load_i8(const void* p) {
  I32x16 out;
#if defined(__AVX512BW__)
  __m128i bytes;
  __builtin_memcpy(&bytes, p, 16);
  out.reg[0] = (RegI)_mm512_maskz_cvtepi8_epi32(__mmask16(0xffff), bytes);
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    out.reg[i] = (RegI)_mm256_cvtepi8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + 8 * i)));
#else
  int8_t bytes[16];
  int32_t wide[16];
  __builtin_memcpy(bytes, p, 16);
  for (int i = 0; i < 16; ++i) wide[i] = int32_t(bytes[i]);
  __builtin_memcpy(&out, wide, 64);
#endif
  return to_f32(out);
}
/// 16 unsigned bytes -> lanes.
LACUNA_INLINE U32x16 load_u8(const void* p) {
  U32x16 out;
#if defined(__AVX512BW__)
  __m128i bytes;
  __builtin_memcpy(&bytes, p, 16);
  out.reg[0] = (RegU)_mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), bytes);
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    out.reg[i] = (RegU)_mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + 8 * i)));
#else
  uint8_t bytes[16];
  uint32_t wide[16];
  __builtin_memcpy(bytes, p, 16);
  for (int i = 0; i < 16; ++i) wide[i] = int32_t(bytes[i]);
  __builtin_memcpy(&out, wide, 64);
#endif
  return out;
}

/// acc + sum over the 4 bytes of each lane of code * x; codes unsigned, at most kMaxCode; x: 4 signed bytes in
/// [-127, 127], the same for all lanes. Exact.
template <int kMaxCode>
LACUNA_INLINE RegI dot4_reg(RegI acc, RegU codes, RegI x) {
#if defined(__AVX512VNNI__)
  return (RegI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#elif defined(__AVX512BW__)
  if constexpr (kMaxCode <= 127) {  // a pair is at most 127 * 127 * 2 < 2^15
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
    return acc + (RegI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  } else {
    const __m512i even = _mm512_madd_epi16((__m512i)(codes & (RegU)splat_reg(0x00ff00ff)),
                                           _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)codes, 8), _mm512_srai_epi16((__m512i)x, 8));
    return acc + (RegI)even + (RegI)odd;
  }
#elif defined(__AVX2__)
  if constexpr (kMaxCode <= 127) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    return acc + (RegI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  } else {
    const __m256i even = _mm256_madd_epi16((__m256i)(codes & (RegU)splat_reg(0x00ff00ff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8), _mm256_srai_epi16((__m256i)x, 8));
    return acc + (RegI)even + (RegI)odd;
  }
#elif defined(__SSE2__)
  const __m128i even =
      _mm_madd_epi16((__m128i)(codes & (RegU)splat_reg(0x00ff00ff)), _mm_srai_epi16(_mm_slli_epi16((__m128i)x, 8), 8));
  const __m128i odd = _mm_madd_epi16(_mm_srli_epi16((__m128i)codes, 8), _mm_srai_epi16((__m128i)x, 8));
  return acc + (RegI)even + (RegI)odd;
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t xs = vreinterpretq_s8_s32((int32x4_t)x);
  if constexpr (kMaxCode <= 127) {
    return (RegI)vdotq_s32((int32x4_t)acc, vreinterpretq_s8_u32((uint32x4_t)codes), xs);
  } else {  // code = (code - 128) + 64 + 64, each a signed byte
    const RegU shifted = codes ^ (RegU)splat_reg(int32_t(0x80808080u));
    const int8x16_t half = vdupq_n_s8(64);
    int32x4_t sum = vdotq_s32((int32x4_t)acc, vreinterpretq_s8_u32((uint32x4_t)shifted), xs);
    sum = vdotq_s32(sum, half, xs);
    return (RegI)vdotq_s32(sum, half, xs);
  }
#else
  for (int byte = 0; byte < 4; ++byte) {
    const RegI code = (RegI)((codes >> (8 * byte)) & (RegU)splat_reg(0xff));
    acc += code * ((RegI)((RegU)x << (24 - 8 * byte)) >> 24);
  }
  return acc;
#endif
}

#if defined(__AVX2__)
/// 16-bit sums of two products of unsigned and signed bytes, and the 32-bit sums of two of them.
LACUNA_INLINE RegH multiply_pairs(RegU codes, RegI x) {
#if defined(__AVX512BW__)
  return (RegH)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#else
  return (RegH)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#endif
}
LACUNA_INLINE RegI add_pairs(RegH pairs) {
#if defined(__AVX512BW__)
  return (RegI)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
  return (RegI)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}
#endif

/// Four consecutive activation codes in every lane.
LACUNA_INLINE RegI splat4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return splat_reg(four);
}
template <int kMaxCode>
LACUNA_INLINE I32x16 dot4(const I32x16& acc, const U32x16& codes, RegI x) {
  I32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = dot4_reg<kMaxCode>(acc.reg[i], codes.reg[i], x);
  return out;
}

}  // namespace lacuna::cpu::LACUNA_ISA
