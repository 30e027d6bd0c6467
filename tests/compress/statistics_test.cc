// Sums over calibration tokens against plain double loops.
#include "compress/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/rng.h"

namespace lacuna::compress {
namespace {

at::Tensor random_inputs(int64_t tokens, int64_t K, uint64_t seed) {
  Rng rng(seed);
  at::Tensor x = at::empty({tokens, K}, at::kFloat);
  for (int64_t i = 0; i < x.numel(); ++i) x.data_ptr<float>()[i] = float(rng.normal() + 0.25);
  return x;
}

TEST(StatisticsSums, AreSecondMomentAndMeanOfAllTokens) {
  // Less than a block of the sum's rows, a block, and blocks with a rest.
  for (const int64_t K : {1, 5, 128, 300}) {
    SCOPED_TRACE(K);
    const at::Tensor first = random_inputs(40, K, 1), second = random_inputs(7, K, 2);
    StatisticsSums sums;
    for (int i = 0; i < model::kInputs; ++i) {
      sums.add(model::Input(i), first);
      sums.add(model::Input(i), second * float(i + 1));
    }
    const auto all = sums.finish(0);
    for (int i = 0; i < model::kInputs; ++i) {
      const at::Tensor x = at::cat({first, second * float(i + 1)}).to(at::kDouble);
      const solver::Statistics& got = all[size_t(i)];
      EXPECT_EQ(got.tokens, 47);
      EXPECT_TRUE(got.second_moment.is_contiguous());
      EXPECT_TRUE(got.second_moment.equal(got.second_moment.t()));
      // 40 float products of a window, then one rounding to float: 42 half steps of the sum of sizes at most.
      const at::Tensor bound = x.abs().t().matmul(x.abs()) / 47 * (42 * 0x1p-24);
      const at::Tensor off = (got.second_moment.to(at::kDouble) - x.t().matmul(x) / 47).abs();
      EXPECT_TRUE(off.le(bound).all().item<bool>()) << (off / bound).max().item<double>();
      EXPECT_LT(((got.mean_abs.to(at::kDouble) - x.abs().mean(0)) / x.abs().mean(0)).abs().max().item<double>(), 1e-7);
    }
  }
}

TEST(StatisticsSums, SayWhichLayerAndInputOverflow) {
  StatisticsSums sums;
  for (int i = 0; i < model::kInputs; ++i) {
    at::Tensor x = random_inputs(4, 130, 3);
    if (model::Input(i) == model::Input::ffn_down) x[2][129] = std::sqrt(std::numeric_limits<float>::max()) * 2;
    sums.add(model::Input(i), x);
  }
  try {
    sums.finish(3);
    FAIL() << "an infinite moment passed";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("layer 3: the second moment of"));
  }
}

}  // namespace
}  // namespace lacuna::compress
