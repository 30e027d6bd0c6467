#include "core/e4m3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lacuna {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

static_assert(to_e4m3(1.0f).bits == 0x38 && to_float(e4m3{0x38}) == 1.0f, "conversions work at compile time");

TEST(E4m3, EveryCodeIsWhatTheSpecificationSays) {
  for (int code = 0; code < 256; ++code) {
    const float value = to_float(e4m3{uint8_t(code)});
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    if (exponent == 15 && mantissa == 7) {
      EXPECT_TRUE(std::isnan(value) && is_nan(e4m3{uint8_t(code)})) << code;
      continue;
    }
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
    EXPECT_EQ(std::abs(value), magnitude) << code;
    EXPECT_FALSE(is_nan(e4m3{uint8_t(code)})) << code;
    EXPECT_EQ(to_e4m3(value).bits, code) << "comes back";
  }
}

// Between each pair of neighbours: the midpoint goes to the even one, a float step to either side decides.
TEST(E4m3, RoundsToNearestEven) {
  for (int low = 0; low < 0x7e; ++low) {
    const int high = low + 1, even = low % 2 == 0 ? low : high;
    const float middle = 0.5f * (to_float(e4m3{uint8_t(low)}) + to_float(e4m3{uint8_t(high)}));
    for (const int sign : {0, 0x80}) {
      const float s = sign != 0 ? -1.0f : 1.0f;
      EXPECT_EQ(to_e4m3(s * middle).bits, sign | even) << low;
      EXPECT_EQ(to_e4m3(s * std::nextafter(middle, 0.0f)).bits, sign | low) << low;
      EXPECT_EQ(to_e4m3(s * std::nextafter(middle, 1e9f)).bits, sign | high) << low;
    }
  }
}

// RECIPES 19.
TEST(E4m3, SaturatesAndKeepsNan) {
  for (const float x : {448.0f, 464.0f, std::nextafter(464.0f, 1e9f), 480.0f, 1e4f, 3e38f, kInf}) {
    EXPECT_EQ(to_e4m3(x).bits, 0x7e) << x;
    EXPECT_EQ(to_e4m3(-x).bits, 0xfe) << x;
  }
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::quiet_NaN()).bits, 0x7f);
  EXPECT_TRUE(is_nan(to_e4m3(-std::numeric_limits<float>::signaling_NaN())));
  EXPECT_EQ(to_e4m3(0.0f).bits, 0x00);
  EXPECT_EQ(to_e4m3(-0.0f).bits, 0x80);
  EXPECT_EQ(to_e4m3(0x1p-10f).bits, 0x00) << "half of the least value: a tie, 0 is even";
  EXPECT_EQ(to_e4m3(-0x1p-10f).bits, 0x80);
  EXPECT_EQ(to_e4m3(std::nextafter(0x1p-10f, 1.0f)).bits, 0x01);
  EXPECT_EQ(to_e4m3(1e-40f).bits, 0x00);
}

}  // namespace
}  // namespace lacuna
