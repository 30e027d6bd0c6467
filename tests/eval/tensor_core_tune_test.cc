#include "eval/tensor_core_tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"

namespace lacuna::eval {
namespace {

std::vector<PlanTimes> plans(const std::vector<std::vector<double>>& us) {
  std::vector<PlanTimes> out;
  for (const std::vector<double>& times : us) out.push_back({{128, 64 * int(out.size() + 1), 1}, times});
  return out;
}

TEST(TensorCoreTune, MiddleAndQuartiles) {
  EXPECT_EQ(spread_of({3}).median, 3);
  EXPECT_EQ(spread_of({3}).quartiles, 0);
  EXPECT_EQ(spread_of({4, 1}).median, 2.5);
  EXPECT_EQ(spread_of({5, 1, 2, 4, 3}).median, 3);
  EXPECT_EQ(spread_of({5, 1, 2, 4, 3}).quartiles, 2);
  EXPECT_EQ(spread_of({1, 2, 3, 4, 5, 6, 7, 800}).quartiles, 3) << "one outlier does not count";
  EXPECT_THROW(spread_of({}), Error);
}

TEST(TensorCoreTune, APlanMustBeFasterByMoreThanTheSpread) {
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10}})), 0u);
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10}, {10, 10, 10, 10}})), 0u) << "the same";
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10}, {9, 9, 9, 9}})), 1u);
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10}, {11, 11, 11, 11}})), 0u);
  // Faster by 1 in the median, but by -2 to 4 from quartile to quartile.
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10, 10, 10, 10, 10}, {12, 12, 12, 12, 6, 6, 6, 6}})), 0u);
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10}, {9, 9, 9, 9}, {8, 8, 8, 8}, {8.5, 8.5, 8.5, 8.5}})), 2u);
  // The one that gains most is within its spread, so that the next one counts.
  EXPECT_EQ(choose_plan(plans({{10, 10, 10, 10}, {1, 1, 12, 12}, {9.5, 9.5, 9.5, 9.5}})), 2u);
}

// A clock that slows down by half from round to round: each round's own difference counts.
TEST(TensorCoreTune, DriftOfTheClockDoesNotHideAGain) {
  std::vector<std::vector<double>> us(2);
  for (int round = 0; round < 9; ++round) {
    const double clock = 100 + 6 * round;
    us[0].push_back(clock), us[1].push_back(0.97 * clock);
  }
  EXPECT_EQ(choose_plan(plans(us)), 1u);
  EXPECT_LT(spread_of(us[0]).median - spread_of(us[1]).median, spread_of(us[0]).quartiles);
}

TEST(TensorCoreTune, TheTuningHasBothMedians) {
  ProductTimes times;
  times.product = {{.eight_bits = true, .sparse = true}, cuda::Accumulate::fast, 64, 128, 0, 256};
  times.plans = plans({{12, 10, 11}, {9, 8, 7}});
  times.chosen = choose_plan(times.plans);
  EXPECT_EQ(times.tuning(), (cuda::TensorCoreTuning{times.product, {128, 128, 1}, 11, 8}));
}

TEST(TensorCoreTune, DifferencesOfResults) {
  const auto values = [](std::vector<float> from) {
    std::vector<bf16> out;
    for (const float v : from) out.push_back(to_bf16(v));
    return out;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(relative_difference(values({3, 4}), values({3, 4})), 0);
  EXPECT_EQ(relative_difference(values({3, 5}), values({3, 4})), 0.2);
  EXPECT_EQ(relative_difference({}, {}), 0);
  EXPECT_TRUE(std::isnan(relative_difference(values({3, nan}), values({3, nan})))) << "never written by either";
  EXPECT_TRUE(std::isnan(relative_difference(values({3, nan}), values({3, 4}))));
  EXPECT_THROW(relative_difference(values({3}), values({3, 4})), Error);
}

}  // namespace
}  // namespace lacuna::eval
