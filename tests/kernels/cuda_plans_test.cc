#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "kernels/cuda/plans.h"

namespace lacuna::cuda {
namespace {

using layout::Id;
using testing::HasSubstr;
using testing::ThrowsMessage;

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

GroupsPlan with_blocks(int blocks) {
  GroupsPlan plan;
  plan.blocks = blocks;
  return plan;
}

TEST(CudaPlans, TheNearestKeptShareOfTheSameGroupsServes) {
  const auto blocks = [](const Plans& plans, const GroupsProduct& product) {
    const GroupsPlan* const plan = plans.find_groups(product);
    return plan == nullptr ? 0 : plan->blocks;
  };
  Plans plans;
  EXPECT_TRUE(plans.empty());
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 50}), 0);
  plans.set(GroupsProduct{Id::gs4, 16, 4096, 16, 50}, with_blocks(5));
  EXPECT_FALSE(plans.empty());
  plans.set(GroupsProduct{Id::gs4, 16, 4096, 16, 100}, with_blocks(10));
  plans.set(GroupsProduct{Id::gs4, 16, 4096, 32, 70}, with_blocks(7));
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 50}), 5);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 100}), 10);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 0}), 5);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 70}), 5);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 80}), 10);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 32, 50}), 7);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 64, 50}), 0);
  EXPECT_EQ(blocks(plans, {Id::gs3, 16, 4096, 16, 50}), 0);
  EXPECT_EQ(blocks(plans, {Id::gs4, 17, 4096, 16, 50}), 0);
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4112, 16, 50}), 0);
  plans.set(GroupsProduct{Id::gs4, 16, 4096, 16, 50}, with_blocks(6));
  EXPECT_EQ(blocks(plans, {Id::gs4, 16, 4096, 16, 50}), 6);
  EXPECT_EQ(plans.find({Id::gs4, 16, 4096, 0}), nullptr) << "zigzag plans are others";
}

TEST(CudaPlans, WhatNoLaunchTakesIsAnError) {
  const GroupsProduct units{Id::gs4, 16, 4096, 16, 50}, chunks{Id::gs8, 16, 4096, 16, 50};
  EXPECT_TRUE(units.are_units());
  EXPECT_FALSE(chunks.are_units());
  for (const GroupsProduct& product : {units, chunks})
    for (GroupsPlan plan : groups_plans(layout::get(product.layout), product.are_units())) {
      plan.blocks = 33;
      EXPECT_NO_THROW(check_plan(product, plan));
    }
  const auto refused = [](const GroupsProduct& product, const GroupsPlan& plan, const char* words) {
    EXPECT_THAT([&] { check_plan(product, plan); }, ThrowsMessage<Error>(HasSubstr(words)));
  };
  GroupsPlan plan = groups_plans(layout::get(Id::gs4), true)[0];
  plan.blocks = 33;
  refused(chunks, plan, "gs8 16 x 4096, groups of 16, 50% kept: no kernel has the plan stream-K, 33 blocks");
  GroupsPlan other = plan;
  other.math = Math::mma;
  refused(units, other, "no kernel has the plan");
  other = plan, other.warps = 7;
  refused(units, other, "no kernel has the plan");
  other = plan, other.resident = 31;
  refused(units, other, "no kernel has the plan");
  other = plan, other.split = Split::slice;
  EXPECT_NO_THROW(check_plan(units, other)) << "units are shared out in any number";
  GroupsPlan slice = groups_plans(layout::get(Id::gs8), false)[0];
  slice.split = Split::slice, slice.blocks = 33;
  refused(chunks, slice, "33 blocks of slice-K are no multiple of the 16 panels");
  slice.blocks = 32;
  EXPECT_NO_THROW(check_plan(chunks, slice));
}

TEST(CudaPlans, Names) {
  EXPECT_EQ(describe(GroupsProduct{Id::gs4, 48, 4096, 16, 50}), "gs4 48 x 4096, groups of 16, 50% kept");
  EXPECT_EQ(describe(Product{Id::zz4_k, 86, 4096, 50}), "zz4_k 86 x 4096, 50%");
  EXPECT_EQ(describe(Product{Id::zz6_k, 2, 40, 0}), "zz6_k 2 x 40, dense");
}

}  // namespace
}  // namespace lacuna::cuda
