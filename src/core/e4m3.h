// src/core/e4m3.h - FP8 E4M3 as the OCP 8-bit floating point specification (revision 1.0) has it: sign, 4 bits of
// exponent with bias 7, 3 bits of mantissa. There is no infinity; 0x7f and 0xff are NaN, the largest value is 448, the
// least normal one 2^-6, the least one 2^-9.
#pragma once

#include <bit>
#include <cstdint>

namespace lacuna {

struct e4m3 {
  uint8_t bits;
  friend bool operator==(e4m3, e4m3) = default;
};
static_assert(sizeof(e4m3) == 1);

inline constexpr float kLargestE4m3 = 448;
/// The least scale: a normal float whose inverse is one too, so that rows of zeros and of denormals need no branch.
inline constexpr float kLeastE4m3Scale = 0x1p-126f;

/// Scale of values of which |x| <= most: most / 448, or kLeastE4m3Scale where that is larger. A NaN counts as 0, an
/// infinity gives an infinite scale.
constexpr float e4m3_scale(float most) {
  const float scale = most / kLargestE4m3;
  return scale > kLeastE4m3Scale ? scale : kLeastE4m3Scale;
}

constexpr bool is_nan(e4m3 code) { return (code.bits & 0x7f) == 0x7f; }

/// Exact for every code.
constexpr float to_float(e4m3 code) {
  const uint32_t sign = uint32_t(code.bits & 0x80u) << 24;
  const uint32_t exponent = (code.bits >> 3) & 0xfu, mantissa = code.bits & 7u;
  if (is_nan(code)) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(mantissa) * 0x1p-9f));
}

/// Rounds to nearest even and saturates: what is beyond +-448, infinities included, becomes +-448. NaN stays NaN; zeros
/// and what rounds to zero keep their sign.
constexpr e4m3 to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint8_t sign = uint8_t((bits >> 24) & 0x80u);
  if (magnitude > 0x7f800000u) return {uint8_t(sign | 0x7f)};
  if (magnitude >= std::bit_cast<uint32_t>(kLargestE4m3)) return {uint8_t(sign | 0x7e)};
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 places the subnormal's last bit at the float's last bit
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return {uint8_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u))};
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1);
  return {uint8_t(sign | ((rounded - 0x3c000000u) >> 20))};
}

}  // namespace lacuna
