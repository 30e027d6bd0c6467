// tests/calibrate/same_calibration.h - calibration of one model on the CPU and on another device, compared.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "calibrate/calibrate.h"
#include "calibrate/sparse_quantiles.h"
#include "core/rng.h"
#include "core/thread_pool.h"
#include "layout/layout.h"
#include "model/block.h"
#include "model/synth.h"

namespace lacuna::test {

/// Shares of the layers' inputs that a search found are off as its errors are; thresholds are quantiles: a bin is 2^-9
/// wide, and what is added to values at random moves their quantiles by its square.
struct CalibrationTolerance {
  double uniform = 0;  // thresholds of mode uniform, relative
  double layered = 0;  // shares of mode layered, in points
  double trial = 0;    // errors of a block's output, relative
};

/// A model of random weights with a vocabulary of kSmallVocabulary and a context of 64; biases: qwen2, tied.
inline constexpr int64_t kSmallVocabulary = 301;
inline void synthesize_small(const std::string& path, layout::Id id, bool biases) {
  const model::ModelShape shape = {
      "small", biases ? "qwen2" : "llama", 2, 128, 4, 2, 64, 320, kSmallVocabulary, 64, 1e-5, 10000, 1, biases, biases};
  ThreadPool pool(2);
  model::synthesize(shape, path, {.layout = id, .head_layout = layout::Id::f32, .progress = false}, pool);
}

inline std::vector<int32_t> random_ids(size_t count) {
  Rng rng(3);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = int32_t(rng.below(uint64_t(kSmallVocabulary)));
  return ids;
}

inline calibrate::CalibrateOptions small_calibration() {
  calibrate::CalibrateOptions options;
  options.levels = {0.25, 0.5};
  options.modes = {model::Mode::uniform, model::Mode::greedy, model::Mode::layered};
  options.criteria = {model::Criterion::magnitude, model::Criterion::wina};
  options.tokens = 200;  // the last window is short
  options.sparse_tokens = 120;
  options.ctx = 48;
  options.search_windows = 3;
  options.search_window = 20;
  options.sensitivity_tokens = 24;
  options.progress = false;
  return options;
}

/// Every mode and criterion. ids: at least 200.
inline void expect_same_calibration(calibrate::Subject& cpu, calibrate::Subject& gpu, const io::Checkpoint& checkpoint,
                                    std::span<const int32_t> ids, const CalibrationTolerance& tolerance) {
  const calibrate::CalibrateOptions options = small_calibration();
  const model::ThresholdSet a = calibrate::calibrate(cpu, checkpoint, ids, "sha", options).set;
  const model::ThresholdSet b = calibrate::calibrate(gpu, checkpoint, ids, "sha", options).set;
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(cpu.bytes(), gpu.bytes());
  ASSERT_EQ(a.entries.size(), b.entries.size());
  for (size_t e = 0; e < a.entries.size(); ++e) {
    const auto &expected = a.entries[e], &found = b.entries[e];
    SCOPED_TRACE(std::string(name_of(expected.mode)) + " " + std::string(name_of(expected.criterion)));
    ASSERT_EQ(found.mode, expected.mode);
    ASSERT_EQ(found.criterion, expected.criterion);
    for (size_t level = 0; level < options.levels.size(); ++level) {
      for (size_t l = 0; l < expected.t[level].size(); ++l)
        for (size_t i = 0; i < size_t(model::kInputs); ++i) {
          const double t = expected.t[level][l][i], other = found.t[level][l][i];
          EXPECT_TRUE(std::isfinite(other));
          if (expected.mode == model::Mode::uniform) {
            EXPECT_NEAR(other, t, tolerance.uniform * t) << l << " " << i;
          }
          if (expected.mode == model::Mode::layered) {
            EXPECT_NEAR(found.realised[level][l][i], expected.realised[level][l][i], tolerance.layered)
                << l << " " << i;
          }
        }
      EXPECT_NEAR(model::skipped_share(found.realised[level], gpu.bytes()),
                  model::skipped_share(expected.realised[level], cpu.bytes()), 0.01);
    }
    // What the CPU's thresholds leave out when they are in use.
    model::Thresholds thresholds;
    thresholds.criterion = expected.criterion;
    if (expected.criterion == model::Criterion::wina) thresholds.norms = a.norms;
    thresholds.t = expected.t.back();
    const auto held_out = [&](calibrate::Subject& subject) {
      return calibrate::realised_shares(subject, ids.first(100), thresholds, {.ctx = 48, .progress = false});
    };
    const model::PerInput here = held_out(cpu), there = held_out(gpu);
    for (size_t l = 0; l < here.size(); ++l)
      for (size_t i = 0; i < size_t(model::kInputs); ++i) EXPECT_NEAR(here[l][i], there[l][i], 0.01) << l << " " << i;
  }
}

/// Errors of a block whose matrices leave inputs out one after the other; and what the search makes of them, which may
/// take another way where two matrices cost the same: it is as good on the CPU's block.
inline void expect_same_search(calibrate::Subject& cpu, calibrate::Subject& gpu, std::span<const int32_t> ids,
                               const CalibrationTolerance& tolerance) {
  constexpr int64_t kWindows = 3, kWindow = 20, kDensePrefix = 4;
  const model::Config& config = cpu.config();
  const auto part = ids.first(size_t(kWindows * kWindow));
  const calibrate::Statistics sizes =
      calibrate::collect_statistics(cpu, ids, {}, {.ctx = 48, .skipped = kDensePrefix, .progress = false});
  std::vector<float> norms(size_t(std::ranges::max(model::input_widths(config))));
  Rng rng(1);
  for (float& norm : norms) norm = float(1 + rng.uniform());
  const auto walk = cpu.walk(kWindows, kWindow, kDensePrefix), other = gpu.walk(kWindows, kWindow, kDensePrefix);
  walk->begin(part);
  other->begin(part);
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    calibrate::BlockTrials &expected = walk->next(), &found = other->next();
    for (const float* of : {static_cast<const float*>(nullptr), static_cast<const float*>(norms.data())}) {
      expected.restart();
      found.restart();
      model::Block::Masks masks{};
      for (size_t m = 0; m < size_t(model::kMatrices); ++m) {
        const auto matrix = model::Matrix(m);
        ASSERT_EQ(found.has(matrix), expected.has(matrix));
        EXPECT_EQ(found.weight_bytes(matrix), expected.weight_bytes(matrix));
        if (!expected.has(matrix)) continue;
        for (const bool keep : {false, true}) {
          const auto& histogram = sizes.magnitude[size_t(layer)][size_t(input_of(matrix))];
          masks[m] = {histogram.quantile(keep ? 0.4 : 0.6), of, 1};
          const double error = expected.error(matrix, masks, keep);
          EXPECT_GT(error, 0);
          EXPECT_NEAR(found.error(matrix, masks, keep), error, tolerance.trial * error)
              << "layer " << layer << ", matrix " << m << (of ? ", norms" : "") << (keep ? ", kept" : "");
        }
      }
    }
    // Errors under the shares of both searches, each matrix on the CPU.
    const auto error_of = [&](calibrate::BlockTrials& searched) {
      const auto& magnitude = sizes.magnitude[size_t(layer)];
      const auto point = calibrate::point_at(calibrate::search_block(searched, magnitude, nullptr, 0.5, {}), 0.5);
      expected.restart();
      model::Block::Masks masks{};
      double error = 0;
      for (size_t m = 0; m < size_t(model::kMatrices); ++m) {
        const auto matrix = model::Matrix(m);
        if (!expected.has(matrix)) continue;
        const auto input = size_t(input_of(matrix));
        masks[m] = {magnitude[input].quantile(point.share[input]), nullptr, 1};
        error = expected.error(matrix, masks, true);
      }
      return error;
    };
    const double best = error_of(expected);
    EXPECT_NEAR(error_of(found), best, 2 * tolerance.trial * best) << "layer " << layer;
  }
}

}  // namespace lacuna::test
