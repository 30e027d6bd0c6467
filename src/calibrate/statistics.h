// src/calibrate/statistics.h - sizes of the inputs of a model's layers, from running a text through it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "calibrate/histogram.h"
#include "model/decoder.h"

namespace lacuna::calibrate {

using ColumnNorms = std::vector<std::array<std::vector<float>, model::kInputs>>;  // [layers][inputs][K]

struct Statistics {
  /// [layers][inputs]: |x|, and |x| times the column's norm where norms were given.
  std::vector<std::array<Histogram, model::kInputs>> magnitude, wina;
  int64_t tokens = 0;  // in the histograms

  const std::vector<std::array<Histogram, model::kInputs>>& of(model::Criterion criterion) const {
    return criterion == model::Criterion::magnitude ? magnitude : wina;
  }
};

struct StatisticsOptions {
  int64_t ctx = 2048;
  int64_t skipped = 4;  // first positions of each window, which run dense
  bool progress = true;
  std::string label = "Statistics";  // of the progress
  int64_t group = 1;                 // inputs that are left out together
};

/// Adds the sizes of M rows of K inputs: |x|, times norms [K] unless that is nullptr. group > 1: of their groups
/// (kernels::group_size).
void add_sizes(const float* x, int64_t M, int64_t K, const float* norms, int64_t group, Histogram& sizes);

/// Runs ids in windows of ctx tokens (the last one may be short) through the decoder as it is. `observe` sees what
/// Decoder's observer sees, without the first `skipped` positions of a window. Throws Error naming layer, input and
/// position of a value that is not finite.
void run_observed(model::Decoder& decoder, std::span<const int32_t> ids, const StatisticsOptions& options,
                  const model::Decoder::Observer& observe);

/// Of the dense model. norms: empty, or of every layer.
Statistics collect_statistics(model::Decoder& decoder, std::span<const int32_t> ids, const ColumnNorms& norms,
                              const StatisticsOptions& options);

}  // namespace lacuna::calibrate
