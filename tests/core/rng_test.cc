#include "core/rng.h"

#include <gtest/gtest.h>

#include <array>

namespace lacuna {
namespace {

// The stream is part of every seeded result: these values never change. They are the published ones of SplitMix64.
TEST(Rng, FrozenStream) {
  Rng zero(0), other(1234567);
  EXPECT_EQ(zero.next(), 0xe220a8397b1dcdafull);
  EXPECT_EQ(zero.next(), 0x6e789e6aa1b965f4ull);
  EXPECT_EQ(zero.next(), 0x06c45d188009454full);
  for (const uint64_t value : {6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull})
    EXPECT_EQ(other.next(), value);
}

TEST(Rng, FrozenDerivedDraws) {
  Rng uniform(0), below(0);
  EXPECT_EQ(uniform.uniform(), double(0xe220a8397b1dcdafull >> 11) / 9007199254740992.0);
  EXPECT_EQ(below.below(1000), 883u);  // floor(0xe220.../2^64 * 1000)
  EXPECT_EQ(below.below(1), 0u);
  // Box-Muller of the first two draws; the C library's log and cos may differ in the last bit.
  Rng normal(0);
  const double u = 1.0 - double(0xe220a8397b1dcdafull >> 11) * 0x1p-53,
               v = double(0x6e789e6aa1b965f4ull >> 11) * 0x1p-53;
  EXPECT_NEAR(normal.normal(), std::sqrt(-2 * std::log(u)) * std::cos(2 * 3.14159265358979323846 * v), 1e-14);
}

TEST(Rng, Ranges) {
  Rng rng(42);
  std::array<int, 7> counts{};
  double sum = 0, squares = 0;
  constexpr int kDraws = 70000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = rng.uniform();
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    const uint64_t k = rng.below(7);
    ASSERT_LT(k, 7u);
    ++counts[k];
    const double n = rng.normal();
    ASSERT_TRUE(std::isfinite(n));
    sum += n;
    squares += n * n;
  }
  // Five standard deviations: counts sqrt(n p q) = 93; mean 1 / sqrt(n); variance sqrt(2 / n).
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 7, 5 * 93);
  EXPECT_NEAR(sum / kDraws, 0.0, 5 / std::sqrt(double(kDraws)));
  EXPECT_NEAR(squares / kDraws, 1.0, 5 * std::sqrt(2.0 / kDraws));
}

}  // namespace
}  // namespace lacuna
