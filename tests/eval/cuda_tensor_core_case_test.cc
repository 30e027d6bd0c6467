// Products with random operands on tensor cores, checked and timed. Compiled also into simt_test, where the kernels run
// on the CPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "eval/tensor_core_tune.h"
#include "kernels/cuda_support.h"

namespace lacuna::eval {
namespace {

using layout::Id;

class CudaTensorCoreCase : public test::CudaTest {
 protected:
  bool emulated() { return device().info().name == "emulated"; }
  RandomWeights weights(Id id, layout::Shape shape) { return random_weights(layout::get(id), shape, 1, pool_); }
  TensorCoreCase make(const RandomWeights& of, const TensorCoreProblem& problem) {
    return TensorCoreCase(device(), of, problem, 2, pool_);
  }

 private:
  ThreadPool pool_{2};
};

// Rounding to bf16 alone gives 2^-9 of a result at most; sums of 14 bits as much again at these K.
TEST_F(CudaTensorCoreCase, ResultsAreThoseOfDoublePrecision) {
  for (const Id id : {Id::f8, Id::nm24_f8, Id::nm24_bf16, Id::bf16})
    for (const TensorCoreProblem& problem :
         {TensorCoreProblem{21, 70, 60}, TensorCoreProblem{40, 64, 36, 3}, TensorCoreProblem{40, 64, 36, 3, true}}) {
      SCOPED_TRACE(fmt::format("{}, {} groups", layout::get(id).name, problem.groups));
      const RandomWeights random = weights(id, {problem.N * std::max(problem.groups, 1), problem.K});
      TensorCoreCase of = make(random, problem);
      const cuda::TensorCoreArgs args = of.arguments(cuda::Accumulate::fast);
      EXPECT_GT(of.error(args), 0);
      EXPECT_LT(of.error(args), 0x1p-8);
      const std::vector<bf16> y = of.results(args);
      EXPECT_EQ(y.size(), size_t(problem.M * problem.N));
      EXPECT_EQ(relative_difference(of.results(args), y), 0) << "every result is written";
      if (problem.groups > 0) continue;
      const std::vector<double> ms = of.time_product(args, 1), quantization = of.time_quantization(3);
      EXPECT_EQ(ms.size(), 1u);
      EXPECT_GT(*std::ranges::min_element(ms), 0);
      EXPECT_EQ(quantization.size(), random.tiles.operation.eight_bits ? 3u : 0u);
    }
}

// The check is code too: a product of other weights is no rounding.
TEST_F(CudaTensorCoreCase, AWrongResultIsSeen) {
  const RandomWeights random = weights(Id::f8, {64, 64});
  TensorCoreCase of = make(random, {33, 64, 64});
  cuda::TensorCoreArgs args = of.arguments(cuda::Accumulate::fast);
  args.activation = cuda::TensorCoreActivation::gelu_tanh;
  EXPECT_GT(of.error(args), kMostTensorCoreError);
}

TEST_F(CudaTensorCoreCase, EveryPlanIsTimed) {
  const RandomWeights random = weights(Id::nm24_f8, {320, 256});
  TensorCoreCase of = make(random, {300, 320, 256});
  if (cuda::tensor_core_plans(random.tiles.operation, cuda::Accumulate::fast).empty() || device().info().major != 9) {
    EXPECT_THAT([&] { tune_tensor_core(of, cuda::Accumulate::fast, {}); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("runs no plan of the wgmma kernel")));
    return;
  }
  for (const cuda::Accumulate accumulate : {cuda::Accumulate::fast, cuda::Accumulate::full}) {
    const ProductTimes times = tune_tensor_core(of, accumulate, {.rounds = 5, .graph_ms = 0.1});
    EXPECT_EQ(times.product, (cuda::TensorCoreProduct{random.tiles.operation, accumulate, 320, 256, 0, 300}));
    const auto plans = cuda::tensor_core_plans(random.tiles.operation, accumulate);
    ASSERT_EQ(times.plans.size(), plans.size());
    EXPECT_EQ(times.plans[0].plan,
              cuda::default_plan(device().info(), random.tiles.operation, accumulate, 300, 320, 0));
    for (const cuda::TensorCorePlan& plan : plans)
      EXPECT_EQ(std::ranges::count(times.plans, plan, &PlanTimes::plan), 1);
    for (const PlanTimes& plan : times.plans) {
      EXPECT_EQ(plan.us.size(), 5u);
      EXPECT_GT(*std::ranges::min_element(plan.us), 0);
    }
    EXPECT_EQ(times.chosen, choose_plan(times.plans));
    EXPECT_LT(times.error, kMostTensorCoreError);
    EXPECT_LE(times.tuning().tuned_us, times.tuning().standard_us);
  }
}

}  // namespace
}  // namespace lacuna::eval
