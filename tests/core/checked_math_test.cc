#include "core/checked_math.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace lacuna {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();

TEST(CheckedMath, ProductsAndSums) {
  EXPECT_EQ(checked_mul(3, -4), -12);
  EXPECT_EQ(checked_mul(kMax, 1), kMax);
  EXPECT_EQ(checked_mul(0, kMin), 0);
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(checked_mul(int64_t{1} << 32, int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(checked_mul(int64_t{1} << 32, int64_t{1} << 32), std::nullopt) << "wraps to zero";
  EXPECT_EQ(checked_mul(kMin, -1), std::nullopt);
  EXPECT_EQ(checked_add(kMax, 0), kMax);
  EXPECT_EQ(checked_add(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_add(kMin, -1), std::nullopt);
}

TEST(CheckedMath, ProductOfDims) {
  const auto product = [](std::vector<int64_t> dims) { return checked_product(dims); };
  EXPECT_EQ(product({}), 1);
  EXPECT_EQ(product({2, 3, 5, 7}), 210);
  EXPECT_EQ(product({1152, (int64_t{1} << 42) + 1}), 1152 * ((int64_t{1} << 42) + 1));
  EXPECT_EQ(product({int64_t{1} << 32, int64_t{1} << 32}), std::nullopt);
  EXPECT_EQ(product({kMax, kMax, 0}), std::nullopt) << "not even where a later zero would undo it";
  EXPECT_EQ(product({0, kMax}), 0);
  EXPECT_EQ(product({-1, -1}), std::nullopt) << "negative dims do not cancel";
}

}  // namespace
}  // namespace lacuna
