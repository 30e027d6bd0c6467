#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "core/error.h"
#include "kernels/cuda/tensor_core_table.h"

namespace lacuna::cuda {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Operation kSparse{.eight_bits = true, .sparse = true}, kDense{.eight_bits = true, .sparse = false},
    kBf16{.eight_bits = false, .sparse = false};

TensorCoreProduct product(int64_t M) { return {kSparse, Accumulate::fast, 3072, 12288, 0, M}; }

/// With the tokens as times, so that the entry found can be told.
TensorCoreTuning tuning(const TensorCoreProduct& of) { return {of, {128, 192, 2}, double(of.M), double(of.M)}; }

TensorCoreTable table(std::initializer_list<int64_t> tokens) {
  TensorCoreTable out;
  for (const int64_t M : tokens) out.set(tuning(product(M)));
  return out;
}

/// Tokens of the entry found; 0: none.
int64_t found(const TensorCoreTable& in, const TensorCoreProduct& of) {
  const TensorCoreTuning* const out = in.find(of);
  return out == nullptr ? 0 : out->product.M;
}

TEST(TensorCoreTable, TheNearestTokensWithinTheBoundAreTaken) {
  const TensorCoreTable some = table({1000, 1200, 4000});
  for (const auto& [asked, expected] : {std::pair{1000, 1000},
                                        {800, 1000},
                                        {799, 0},
                                        {1, 0},
                                        {1095, 1000},  // 1.0950 and 1.0959 away
                                        {1096, 1200},
                                        {1500, 1200},
                                        {1501, 0},
                                        {3199, 0},
                                        {3200, 4000},
                                        {5000, 4000},
                                        {5001, 0}})
    EXPECT_EQ(found(some, product(asked)), expected) << asked;
  EXPECT_EQ(found({}, product(1000)), 0);
  EXPECT_EQ(found(table({100, 144}), product(120)), 144) << "both are a factor 1.2 away";
}

TEST(TensorCoreTable, OnlyTokensMayDiffer) {
  const TensorCoreTable one = table({1000});
  EXPECT_EQ(found(one, product(1100)), 1000);
  const auto other = [&](auto change) {
    TensorCoreProduct asked = product(1000);
    change(asked);
    return found(one, asked);
  };
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.operation = kDense; }), 0);
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.operation = kBf16; }), 0);
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.accumulate = Accumulate::full; }), 0);
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.N = 3073; }), 0);
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.N = 3071; }), 0);
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.K = 12289; }), 0);
  EXPECT_EQ(other([](TensorCoreProduct& p) { p.groups = 1; }), 0);
}

TEST(TensorCoreTable, WhatIsSetAgainIsReplaced) {
  TensorCoreTable twice = table({1000});
  TensorCoreTuning again = tuning(product(1000));
  again.plan.tokens = 64;
  twice.set(again);
  EXPECT_EQ(twice.tunings().size(), 1u);
  EXPECT_EQ(*twice.find(product(1000)), again);
}

TEST(TensorCoreTable, PlansThatTheKernelLacksAreNamed) {
  TensorCoreTable some;
  EXPECT_NO_THROW(some.check_plans("p.json"));
  const auto plans = tensor_core_plans(kSparse, Accumulate::fast);
  for (const TensorCorePlan& plan : plans) {
    some.set({product(100 * plan.tokens), plan, 1, 1});
    EXPECT_NO_THROW(some.check_plans("p.json"));
  }
  some.set({product(7), {128, 200, 2}, 1, 1});
  const std::string kernel = plans.empty() ? "the wgmma kernel, which this build lacks," : "the wgmma kernel";
  EXPECT_THAT([&] { some.check_plans("p.json"); },
              ThrowsMessage<Error>("p.json: nm24_f8 7 x 3072 x 12288: " + kernel +
                                   " has no plan of 128 outputs x 200 tokens, clusters of 2"));
}

TEST(TensorCoreTable, ProductsInWords) {
  EXPECT_EQ(describe(product(7)), "nm24_f8 7 x 3072 x 12288");
  EXPECT_EQ(describe(TensorCoreProduct{kDense, Accumulate::full, 64, 32, 4, 8}),
            "f8 8 x 64 x 32, 4 groups, full accumulation");
  EXPECT_EQ(describe(TensorCorePlan{128, 64, 1}), "128 outputs x 64 tokens, no clusters");
  for (const layout::Id id : {layout::Id::f8, layout::Id::nm24_f8, layout::Id::nm24_bf16, layout::Id::bf16})
    EXPECT_EQ(layout_of(operation_of(layout::get(id))).id, id);
}

/// What launch_tensor_core of a device of compute capability 9.0 runs by a plan.
class PlannedProduct : public testing::Test {
 protected:
  PlannedProduct() {
    device_.name = "a card", device_.major = 9, device_.multiprocessors = 132;
    args_.w = {.operation = kSparse, .N = 6144, .K = 512};
    args_.M = 1000;
  }
  void SetUp() override {
    if (tensor_core_plans(kSparse, Accumulate::fast).empty()) {
      EXPECT_EQ(planned_product(device_, args_), std::nullopt) << "this build has no wgmma kernel";
      has_plans_ = false;
    }
  }
  DeviceInfo device_;
  TensorCoreArgs args_;
  bool has_plans_ = true;
};

TEST_F(PlannedProduct, IsOfTheStagedWgmmaKernel) {
  if (!has_plans_) return;
  EXPECT_EQ(planned_product(device_, args_), (TensorCoreProduct{kSparse, Accumulate::fast, 6144, 512, 0, 1000}));
  args_.groups = 8;
  EXPECT_EQ(planned_product(device_, args_), (TensorCoreProduct{kSparse, Accumulate::fast, 768, 512, 8, 1000}));
  args_.groups = 0, args_.accumulate = Accumulate::full;
  EXPECT_EQ(planned_product(device_, args_)->accumulate, Accumulate::full);
  args_.w.operation = kBf16;
  EXPECT_EQ(planned_product(device_, args_)->accumulate, Accumulate::fast) << "bf16 has one kind of sums";
  const auto none = [&](auto change) {
    TensorCoreArgs args = args_;
    change(args);
    EXPECT_EQ(planned_product(device_, args), std::nullopt);
  };
  none([](TensorCoreArgs& a) { a.M = kMostFewTokens; });
  none([](TensorCoreArgs& a) { a.kernel = TensorCoreKernel::mma; });
  none([](TensorCoreArgs& a) { a.write_back = WriteBack::direct; });
  none([](TensorCoreArgs& a) { a.write_back = WriteBack::separate; });
  none([](TensorCoreArgs& a) { a.type = Element::f32; });
  none([](TensorCoreArgs& a) { a.w.K = 0; });
}

TEST_F(PlannedProduct, TheTablesPlanRunsAndIsExplained) {
  if (!has_plans_) return;
  const TensorCorePlan standard = default_plan(device_, kSparse, Accumulate::fast, args_.M, args_.w.N, 0);
  const auto plans = tensor_core_plans(kSparse, Accumulate::fast);
  const TensorCorePlan other = plans.front() == standard ? plans.back() : plans.front();
  TensorCoreTable measured;
  EXPECT_EQ(find_plan(measured, device_, args_), nullptr);
  EXPECT_EQ(explain_tensor_core(device_, args_, measured),
            explain_tensor_core(device_, args_) + "; plan by the model of rounds of blocks");
  measured.set({{kSparse, Accumulate::fast, 6144, 512, 0, 1100}, other, 12.34, 10.25});
  ASSERT_NE(find_plan(measured, device_, args_), nullptr);
  EXPECT_EQ(*find_plan(measured, device_, args_), other);
  EXPECT_EQ(explain_tensor_core(device_, args_, measured),
            "wgmma of 2:4 e4m3, " + describe(other) +
                ", fast accumulation, staged write-back; plan measured at 1100 tokens: 10.2 us, the model's 12.3 us");
  args_.type = Element::f32;
  EXPECT_EQ(find_plan(measured, device_, args_), nullptr);
  EXPECT_EQ(explain_tensor_core(device_, args_, measured), explain_tensor_core(device_, args_)) << "takes no plan";
}

}  // namespace
}  // namespace lacuna::cuda
