// src/calibrate/statistics.h - sizes of the inputs of a model's layers, from running a text through it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "calibrate/histogram.h"
#include "calibrate/subject.h"
#include "model/sparsity.h"

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

/// Runs ids in windows of ctx tokens (the last one may be short) through the model as it is. `observe` sees what
/// Subject::run() shows it, without the first `skipped` positions of a window. Throws Error as that one does.
void run_observed(Subject& subject, std::span<const int32_t> ids, const StatisticsOptions& options,
                  const InputObserver& observe);

/// Of the dense model. norms: empty, or of every layer.
Statistics collect_statistics(Subject& subject, std::span<const int32_t> ids, const ColumnNorms& norms,
                              const StatisticsOptions& options);

}  // namespace lacuna::calibrate
