#include "core/scalar.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace lacuna {
namespace {

static_assert(to_f16(1.0f).bits == 0x3c00 && to_bf16(1.0f).bits == 0x3f80, "conversions work at compile time");

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

TEST(F16, EveryPatternIsExact) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const float value = to_float(f16{uint16_t(pattern)});
    const int exponent = int(pattern >> 10 & 31), mantissa = int(pattern & 1023);
    ASSERT_EQ(std::signbit(value), pattern >= 0x8000) << pattern;
    if (exponent == 31 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      ASSERT_EQ(bits(value) & 0x7fffffu, uint32_t(mantissa) << 13) << pattern;
      continue;
    }
    const float magnitude = exponent == 31  ? std::numeric_limits<float>::infinity()
                            : exponent == 0 ? std::ldexp(float(mantissa), -24)
                                            : std::ldexp(float(1024 + mantissa), exponent - 25);
    ASSERT_EQ(std::abs(value), magnitude) << pattern;
  }
}

TEST(F16, EveryPatternComesBack) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const f16 h{uint16_t(pattern)};
    const f16 back = to_f16(to_float(h));
    if (std::isnan(to_float(h)))
      ASSERT_EQ(back.bits & 0x7e00, 0x7e00) << "a NaN stays a quiet NaN: " << pattern;
    else
      ASSERT_EQ(back, h) << pattern;
  }
}

// Between each pair of neighbours: the midpoint goes to the even one, a float step to either side decides.
TEST(F16, RoundsToNearestEven) {
  for (uint16_t low = 0; low < 0x7bff; ++low) {
    const uint16_t high = uint16_t(low + 1), even = low % 2 == 0 ? low : high;
    const float middle = 0.5f * (to_float(f16{low}) + to_float(f16{high}));
    for (const uint16_t sign : {0, 0x8000}) {
      const float s = sign ? -1.0f : 1.0f;
      ASSERT_EQ(to_f16(s * middle).bits, sign | even) << low;
      ASSERT_EQ(to_f16(s * std::nextafter(middle, 0.0f)).bits, sign | low) << low;
      ASSERT_EQ(to_f16(s * std::nextafter(middle, 1e9f)).bits, sign | high) << low;
    }
  }
}

TEST(F16, Ends) {
  EXPECT_EQ(to_f16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(to_f16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-65520.0f).bits, 0xfc00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::infinity()).bits, 0x7c00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0) << "half of the smallest: a tie, to even";
  EXPECT_EQ(to_f16(std::nextafter(0x1p-25f, 1.0f)).bits, 1);
  EXPECT_EQ(to_f16(1e-45f).bits, 0);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::signaling_NaN()).bits & 0x7e00, 0x7e00);
}

TEST(Bf16, EveryPatternIsExactAndComesBack) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const bf16 b{uint16_t(pattern)};
    ASSERT_EQ(bits(to_float(b)), pattern << 16);
    if (std::isnan(to_float(b)))
      ASSERT_EQ(to_bf16(to_float(b)).bits, pattern | 0x40) << "a NaN keeps its payload and turns quiet";
    else
      ASSERT_EQ(to_bf16(to_float(b)), b) << pattern;
  }
}

TEST(Bf16, RoundsToNearestEven) {
  for (uint32_t low = 0; low < 0x7f80; ++low) {
    const uint32_t middle = (low << 16) + 0x8000, high = low + 1, even = low % 2 == 0 ? low : high;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const auto round = [&](uint32_t pattern) { return to_bf16(std::bit_cast<float>(pattern | sign << 16)).bits; };
      ASSERT_EQ(round(middle), sign | even) << low;
      ASSERT_EQ(round(middle - 1), sign | low) << low;
      ASSERT_EQ(round(middle + 1), sign | high) << low;
    }
  }
}

TEST(Bf16, NanNeverBecomesInfinity) {
  // Only bits below the cut are set: plain rounding would carry or drop them.
  for (const uint32_t pattern : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
    EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(pattern))))) << pattern;
}

}  // namespace
}  // namespace lacuna
