// Quantiles, the search and the allocation behind the thresholds.
#include "calibrate/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "calibrate/sensitivity.h"
#include "core/error.h"
#include "core/rng.h"
#include "loaded_model.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using model::kInputs;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Histogram, QuantilesAreWithinABin) {
  Rng rng(5);
  Histogram histogram;
  std::vector<float> values;
  for (int i = 0; i < 20001; ++i) {
    values.push_back(std::abs(float(rng.normal())) * (i % 7 == 0 ? 1e4f : 1e-3f));
    histogram.add(values.back());
  }
  std::sort(values.begin(), values.end());
  for (const double share : {0.01, 0.25, 0.4, 0.5, 0.65, 0.9, 0.999}) {
    const float t = histogram.quantile(share), exact = values[size_t(share * double(values.size()))];
    EXPECT_NEAR(t / exact, 1, 1.0 / 512) << share;  // a bin's relative width
    EXPECT_NEAR(histogram.share_below(t), share, 1e-4);
    const auto below = std::lower_bound(values.begin(), values.end(), t) - values.begin();
    EXPECT_NEAR(double(below) / double(values.size()), share, 2e-3);
  }
  EXPECT_EQ(histogram.quantile(0), 0);
  EXPECT_EQ(histogram.share_below(0), 0);
  EXPECT_NEAR(histogram.share_below(1e30f), 1, 1e-12);
  EXPECT_NEAR(histogram.energy_below(1e30f), 1, 1e-12);
  EXPECT_LT(histogram.energy_below(histogram.quantile(0.5)), 1e-6);
}

TEST(Histogram, ZerosAreAlwaysBelow) {
  Histogram histogram;  // as after a ReLU
  for (int i = 0; i < 100; ++i) histogram.add(i < 90 ? 0.0f : float(i));
  const float t = histogram.quantile(0.25);
  EXPECT_GT(t, 0);
  EXPECT_LT(t, 1e-30f);
  EXPECT_NEAR(histogram.share_below(t), 0.9, 1e-9);
  EXPECT_NEAR(histogram.quantile(0.955), 95, 1);
}

TEST(Histogram, CountsByEdges) {
  Histogram histogram;
  for (const float x : {0.0f, 0.5f, 1.0f, 1.5f, 3.0f, 100.0f}) histogram.add(x);
  EXPECT_EQ(histogram.counts({0, 1, 2}), (std::vector<int64_t>{2, 2, 2}));
}

struct Model : test::LoadedModel {
  std::vector<int32_t> ids;
  CpuSubject subject;
  explicit Model(const std::string& path) : LoadedModel(path), subject(*decoder, checkpoint) {
    Rng rng(11);
    for (int i = 0; i < 512; ++i) ids.push_back(int32_t(rng.below(uint64_t(decoder->config().n_vocab))));
  }
};

CalibrateOptions small(const model::Config& config) {
  CalibrateOptions options;
  options.tokens = 512;
  options.ctx = std::min<int64_t>(64, config.n_ctx);
  options.search_windows = 2;
  options.search_window = std::min<int64_t>(32, config.n_ctx);
  options.sensitivity_tokens = std::min<int64_t>(32, config.n_ctx);
  options.modes = {model::Mode::uniform, model::Mode::greedy, model::Mode::layered};
  options.criteria = {model::Criterion::magnitude, model::Criterion::wina};
  options.progress = false;
  return options;
}

TEST(Calibrate, EveryLevelLeavesOutWhatItAsks) {
  for (const char* path : {"text_model", "hf/opt", "hf/opt_post_norm_projected", "hf/qwen3"}) {
    Model model(test::fixture(path));
    const Calibration result =
        calibrate(model.subject, model.checkpoint, model.ids, "sha", small(model.decoder->config()));
    ASSERT_EQ(result.set.entries.size(), 6u);
    EXPECT_EQ(result.set.tokens, result.statistics.tokens);
    EXPECT_LT(result.set.tokens, 512) << "the first positions of a window are left out";
    const auto bytes = model.decoder->sparsity_counts().bytes;
    const bool relu = model.decoder->config().mlp == model::Mlp::relu;
    for (const auto& entry : result.set.entries) {
      for (size_t i = 0; i < result.set.levels.size(); ++i) {
        const double share = model::skipped_share(entry.realised[i], bytes);
        EXPECT_GT(share, result.set.levels[i] - 0.02) << path << name_of(entry.mode) << name_of(entry.criterion);
        EXPECT_LT(share, relu ? 1 : result.set.levels[i] + 0.02) << path;  // the zeros of a ReLU come free
        for (const auto& layer : entry.t[i])
          for (const float t : layer) EXPECT_TRUE(t >= 0 && std::isfinite(t));
      }
    }
    result.set.check_fits(model.decoder->config(), path);
  }
}

// The search starts from nothing and may only find better splits than the even one on the tokens that it sees; shares
// of q, k, v and of gate, up are averaged afterwards, which may cost some of it: 5%.
TEST(Search, GreedyIsNotWorseThanUniform) {
  Model model(test::fixture("text_model"));
  const model::Config& config = model.decoder->config();
  const int64_t window = std::min<int64_t>(64, config.n_ctx);
  const Statistics statistics =
      collect_statistics(model.subject, model.ids, {}, {std::min<int64_t>(64, config.n_ctx), 4, false});
  std::vector<float> x(size_t(2 * window * config.n_embd));
  for (int64_t w = 0; w < 2; ++w)
    model.decoder->embed(std::span(model.ids).subspan(size_t(w * window), size_t(window)), 0,
                         x.data() + w * window * config.n_embd);
  model::Block block(model.checkpoint, config, 0, 2, window, model.pool);
  CpuTrials trials(block, x.data(), 4);
  for (const bool exhaustive : {false, true}) {
    SearchOptions options;
    options.exhaustive = exhaustive;
    const auto path = search_block(trials, statistics.magnitude[0], nullptr, 0.65, options);
    EXPECT_GE(path.back().sparsity, 0.65);
    for (size_t i = 1; i < path.size(); ++i) EXPECT_GT(path[i].sparsity, path[i - 1].sparsity);
    for (const double level : {0.25, 0.5, 0.65}) {
      std::array<double, kInputs> even;
      even.fill(level);
      const SearchPoint point = point_at(path, level);
      EXPECT_NEAR(point.sparsity, level, 1e-9);
      const double greedy = block_error(block, x.data(), statistics.magnitude[0], nullptr, point.share, 4);
      const double uniform = block_error(block, x.data(), statistics.magnitude[0], nullptr, even, 4);
      EXPECT_LT(greedy, 1.05 * uniform) << level << exhaustive;
      EXPECT_GT(greedy, 0);
    }
  }
}

TEST(Allocate, SpendsWhereItCostsLeast) {
  // Two layers alike but that leaving out inputs of the second costs nine times as much.
  Histogram sizes;
  for (int i = 1; i <= 1000; ++i) sizes.add(float(i));
  std::vector<std::array<Histogram, kInputs>> all(2);
  for (auto& layer : all) layer.fill(sizes);
  model::PerInput at(2);
  for (auto& layer : at) layer.fill(sizes.quantile(0.65));
  std::vector<std::array<double, kInputs>> divergence(2);
  divergence[0].fill(1);
  divergence[1].fill(9);
  const std::vector<std::array<int64_t, kInputs>> bytes(2, {100, 100, 100, 100});
  for (const double level : {0.25, 0.5, 0.65}) {
    const auto share = allocate(divergence, at, all, bytes, level);
    // Energy below t of values spread evenly is t^3, its derivative 3 t^2: nine times as dear, a third of the share.
    EXPECT_NEAR((share[0][0] + share[1][0]) / 2, level, 0.01);
    EXPECT_NEAR(share[1][2] / share[0][2], level < 0.6 ? 1.0 / 3 : share[1][2], 0.03);  // at 65% the first is full
    EXPECT_LE(share[0][3], 1);
  }
}

TEST(Calibrate, ShortTextsAndBadValuesAreErrors) {
  Model model(test::fixture("text_model"));
  CalibrateOptions options = small(model.decoder->config());
  EXPECT_THAT([&] { calibrate(model.subject, model.checkpoint, std::span(model.ids).first(20), "sha", options); },
              ThrowsMessage<Error>(HasSubstr("the text has 20")));
  const CalibrateOptions good = options;
  options.levels = {0.5, 0.25};
  EXPECT_THAT([&] { calibrate(model.subject, model.checkpoint, model.ids, "sha", options); },
              ThrowsMessage<Error>(HasSubstr("ascend")));
  options = good;
  options.sparse_tokens = options.skipped;
  EXPECT_THAT([&] { calibrate(model.subject, model.checkpoint, model.ids, "sha", options); },
              ThrowsMessage<Error>(HasSubstr("give more sparse tokens")));
  options = good;
  options.search_window = model.decoder->config().n_ctx + 1;
  EXPECT_THAT([&] { calibrate(model.subject, model.checkpoint, model.ids, "sha", options); },
              ThrowsMessage<Error>(HasSubstr("the search for thresholds")));
}

}  // namespace
}  // namespace lacuna::calibrate
