#include "kernels/plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/linear.h"
#include "layout/zigzag.h"

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
  EXPECT_EQ(plans.of({&q, 1}), default_plan());
  const Plan rows{.split = Plan::Split::rows, .chunk = 64};
  plans.set("zz4_k 512 x 64", rows);
  EXPECT_EQ(plans.of({&q, 1}), rows);
}

TEST(Plan, FieldsAreChecked) {
  check_plan({});
  check_plan(default_plan());
  EXPECT_THROW(check_plan({.chunk = 20}), Error);
  EXPECT_THROW(check_plan({.chunk = 0}), Error);
  EXPECT_THROW(check_plan({.prefetch = -1}), Error);
  EXPECT_THROW(check_plan({.prefetch = 70000}), Error);
  EXPECT_THROW(check_plan({.tile_rows = 100}), Error);
  EXPECT_THROW(check_plan({.tile_rows = -256}), Error);
  EXPECT_THROW(check_plan({.dense_below = 1.5}), Error);
  EXPECT_THROW(check_plan({.dense_below = std::numeric_limits<double>::quiet_NaN()}), Error);
}

TEST(Plan, OfAPreparedGroupCanChangeButForItsTiles) {
  const layout::Layout& zz8 = layout::get(layout::Id::zz8);
  constexpr layout::Shape kShape{600, 70};
  std::vector<std::byte> bytes(size_t(zz8.size_bytes(kShape)));
  Rng rng(3);
  std::vector<float> w(size_t(256 * kShape.K)), x(static_cast<size_t>(kShape.K));
  for (int64_t r = 0; r < 3; ++r) {
    for (float& value : w) value = float(rng.normal());
    layout::encode_zigzag(zz8, kShape, {}, r, w.data(), {}, bytes);
  }
  for (float& value : x) value = float(rng.normal());
  const WeightView view{"w", &zz8, kShape, bytes};
  ThreadPool pool(2);
  const auto run = [&](LinearGroup& group) {
    std::vector<float> y(size_t(kShape.N));
    const Output out{y.data(), kShape.N};
    group.run({x.data(), 1, kShape.K}, {&out, 1});
    return y;
  };
  const Plan rows{.split = Plan::Split::rows, .chunk = 16, .prefetch = 0};
  const auto made = make_cpu_linear_group({&view, 1}, pool, Prepare::automatic, rows);
  const auto changed = make_cpu_linear_group({&view, 1}, pool);
  EXPECT_NE(run(*changed), run(*made)) << "other factors are rounded together";
  changed->set_plan(rows);
  EXPECT_EQ(run(*changed), run(*made));
  EXPECT_NE(changed->explain().find("rows, 16 at a time"), std::string::npos);
  EXPECT_THROW(changed->set_plan({.tile_rows = 256}), Error);
  EXPECT_THROW(changed->set_plan({.chunk = 7}), Error);
  EXPECT_EQ(run(*changed), run(*made));
}

}  // namespace
}  // namespace lacuna::kernels
