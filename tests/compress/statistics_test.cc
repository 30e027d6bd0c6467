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

TEST(StatisticsSums, ClipLargeTokensAndWeighFirstOnes) {
  constexpr int64_t K = 6;
  constexpr double kClip = 2, kFirst = 10;
  at::Tensor x = random_inputs(9, K, 5);
  x[4].mul_(100);  // a token that would decide alone
  const at::Tensor second = random_inputs(5, K, 6);
  StatisticsSums sums({kFirst, kClip});
  for (int i = 0; i < model::kInputs; ++i) {
    sums.add(model::Input(i), x);
    sums.add(model::Input(i), second);
  }
  at::Tensor moment = at::zeros({K, K}, at::kDouble), mean = at::zeros({K}, at::kDouble);
  double weight = 0, squares = 0, outliers = 0;
  for (const at::Tensor& window : {x.to(at::kDouble), second.to(at::kDouble)}) {
    const at::Tensor norms = window.square().sum(1);
    const double median = norms.median().item<double>();
    for (int64_t t = 0; t < window.size(0); ++t) {
      const double norm = norms[t].item<double>(), w = t == 0 ? kFirst : 1;
      const at::Tensor token = window[t] * std::sqrt(std::min(1.0, kClip * median / norm));
      moment += w * token.unsqueeze(1) * token.unsqueeze(0);
      mean += w * token.abs();
      weight += w;
      squares += norm;
      if (norm > 10 * median) outliers += norm;
    }
  }
  ASSERT_GT(outliers, 0.9 * squares);
  const auto all = sums.finish(0);
  for (int i = 0; i < model::kInputs; ++i) {
    const solver::Statistics& got = all[size_t(i)];
    const at::Tensor wanted = moment / weight;
    EXPECT_LT((got.second_moment.to(at::kDouble) - wanted).abs().max().item<double>(),
              1e-5 * wanted.abs().max().item<double>());
    EXPECT_LT(((got.mean_abs.to(at::kDouble) - mean / weight) / (mean / weight)).abs().max().item<double>(), 1e-5);
    EXPECT_NEAR(sums.outlier_share(model::Input(i)), outliers / squares, 1e-6);
  }
}

TEST(StatisticsSums, AWindowThatIsMostlySilentIsNotClipped) {
  StatisticsSums sums({1, 4});
  at::Tensor x = at::zeros({5, 3}, at::kFloat);
  x[1].fill_(2);
  for (int i = 0; i < model::kInputs; ++i) sums.add(model::Input(i), x);
  for (const solver::Statistics& got : sums.finish(0))
    EXPECT_NEAR(got.second_moment[0][1].item<float>(), 4.0 / 5, 1e-6);
}

TEST(StatisticsSums, AHugeTokenIsClippedNotLost) {
  StatisticsSums sums({1, 4});
  at::Tensor x = random_inputs(8, 3, 9);
  x[2] = at::full({3}, 1e25f);  // its square is past float32
  for (int i = 0; i < model::kInputs; ++i) sums.add(model::Input(i), x);
  const double median = x.to(at::kDouble).square().sum(1).median().item<double>();
  for (const solver::Statistics& got : sums.finish(0))
    EXPECT_GE(got.second_moment.diagonal().sum().item<double>() * 8, 4 * median);
}

TEST(StatisticsSums, SilentTokensStaySilent) {
  StatisticsSums sums({100, 4});
  for (int i = 0; i < model::kInputs; ++i) sums.add(model::Input(i), at::zeros({5, 3}, at::kFloat));
  for (const solver::Statistics& got : sums.finish(0)) EXPECT_TRUE((got.second_moment == 0).all().item<bool>());
  EXPECT_EQ(sums.outlier_share(model::Input::attn_in), 0);
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
