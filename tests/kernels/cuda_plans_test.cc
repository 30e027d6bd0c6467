#include <gtest/gtest.h>

#include "kernels/cuda/plans.h"

namespace lacuna::cuda {
namespace {

using layout::Id;

GemvPlan with_segments(int segments) {
  GemvPlan plan;
  plan.segments = segments;
  return plan;
}

TEST(CudaPlans, TheNearestSparsityOfTheSameProductServes) {
  Plans plans;
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 50}), nullptr);
  plans.set({Id::zz4_k, 16, 4096, 0}, with_segments(4));
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 50}), nullptr);  // dense ones are something else
  plans.set({Id::zz4_k, 16, 4096, 25}, with_segments(5));
  plans.set({Id::zz4_k, 16, 4096, 50}, with_segments(6));
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 0})->segments, 4);
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 10})->segments, 5);
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 37})->segments, 5);
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 38})->segments, 6);
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 90})->segments, 6);
  EXPECT_EQ(plans.find({Id::zz6_k, 16, 4096, 50}), nullptr);
  EXPECT_EQ(plans.find({Id::zz4_k, 17, 4096, 50}), nullptr);
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4095, 50}), nullptr);
  GemvPlan dense = with_segments(8);
  dense.skips = false;
  plans.set({Id::zz4_k, 16, 4096, 60}, dense);
  EXPECT_FALSE(plans.find({Id::zz4_k, 16, 4096, 60})->skips);
  EXPECT_FALSE(plans.find({Id::zz4_k, 16, 4096, 56})->skips);
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 61})->segments, 6) << "skipping may pay there";
  plans.set({Id::zz4_k, 16, 4096, 50}, with_segments(7));
  EXPECT_EQ(plans.find({Id::zz4_k, 16, 4096, 50})->segments, 7);
}

TEST(CudaPlans, SegmentsFillTheDeviceAsFarAsColumnsAllow) {
  DeviceInfo device;
  device.multiprocessors = 132;
  const GemvPlan plan{.warps = 8, .chunk = 32, .resident = 24};
  // 132 * 24 / 8 = 396 blocks, over 16 rows.
  EXPECT_EQ(filled(device, {nullptr, nullptr, 16, 4096}, plan, 1).segments, 24);
  EXPECT_EQ(filled(device, {nullptr, nullptr, 16, 4096}, plan, 0.5).segments, 12);
  EXPECT_EQ(filled(device, {nullptr, nullptr, 500, 4096}, plan, 1).segments, 4);  // of 1024 columns at most
  EXPECT_EQ(filled(device, {nullptr, nullptr, 1, 64}, plan, 1).segments, 4);      // of 16 columns at least
  EXPECT_EQ(filled(device, {nullptr, nullptr, 1, 65536}, plan, 1).segments, 256);
  EXPECT_EQ(filled(device, {nullptr, nullptr, 0, 4096}, plan, 1).segments, 256);
}

TEST(CudaPlans, Names) {
  EXPECT_EQ(describe(Product{Id::zz4_k, 86, 4096, 50}), "zz4_k 86 x 4096, 50%");
  EXPECT_EQ(describe(Product{Id::zz6_k, 2, 40, 0}), "zz6_k 2 x 40, dense");
}

}  // namespace
}  // namespace lacuna::cuda
