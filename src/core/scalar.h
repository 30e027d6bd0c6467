// src/core/scalar.h - 16-bit storage types. Arithmetic is done in float; conversions round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace lacuna {

/// IEEE 754 binary16 bits.
struct f16 {
  uint16_t bits;
  friend bool operator==(f16, f16) = default;
};
/// bfloat16 bits: the upper half of a binary32.
struct bf16 {
  uint16_t bits;
  friend bool operator==(bf16, bf16) = default;
};
static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2);

/// Exact for every value, subnormals, infinities and NaN payloads included.
constexpr float to_float(f16 h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000u) << 16;
  const uint32_t exponent = (h.bits >> 10) & 0x1f;
  const uint32_t mantissa = h.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = float(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

constexpr float to_float(bf16 b) { return std::bit_cast<float>(uint32_t(b.bits) << 16); }

/// Rounds to nearest even; |x| >= 65520 becomes infinity, NaN stays NaN (quiet).
constexpr f16 to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 places the subnormal's last bit at the float's last bit
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
}

/// Rounds to nearest even; NaN stays NaN (quiet).
constexpr bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40u)};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace lacuna
