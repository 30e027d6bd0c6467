#include "kernels/plan.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"
#include "kernels/linear.h"

namespace lacuna::kernels {
namespace {

TEST(Plan, KeyNamesLayoutsAndShapes) {
  WeightView q{"q", &layout::get(layout::Id::zz4_k), {1536, 1000}, {}}, k = q, v = q;
  k.shape.N = 256;
  v.shape.N = 256;
  v.layout = &layout::get(layout::Id::zz6_k);
  const WeightView views[] = {q, k, v};
  EXPECT_EQ(plan_key(views), "zz4_k 1536+256+zz6_k 256 x 1000");
  EXPECT_EQ(plan_key({views, 1}), "zz4_k 1536 x 1000");
}

TEST(Plan, PlansReturnTheDefaultForWhatWasNotMeasured) {
  const WeightView q{"q", &layout::get(layout::Id::zz4_k), {512, 64}, {}};
  Plans plans;
  EXPECT_EQ(plans.of({&q, 1}), Plan{});
  const Plan rows{.split = Plan::Split::rows, .chunk = 64};
  plans.set("zz4_k 512 x 64", rows);
  EXPECT_EQ(plans.of({&q, 1}), rows);
}

TEST(Plan, FieldsAreChecked) {
  check_plan({});
  EXPECT_THROW(check_plan({.chunk = 20}), Error);
  EXPECT_THROW(check_plan({.chunk = 0}), Error);
  EXPECT_THROW(check_plan({.tile_rows = 100}), Error);
  EXPECT_THROW(check_plan({.tile_rows = -256}), Error);
  EXPECT_THROW(check_plan({.dense_below = 1.5}), Error);
  EXPECT_THROW(check_plan({.dense_below = std::numeric_limits<double>::quiet_NaN()}), Error);
}

}  // namespace
}  // namespace lacuna::kernels
