// src/calibrate/calibrate.h - thresholds of activation sparsity from a calibration text (SpQt, section 3.2).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "calibrate/search.h"
#include "calibrate/statistics.h"
#include "calibrate/subject.h"
#include "io/checkpoint.h"
#include "model/sparsity.h"

namespace lacuna::calibrate {

struct CalibrateOptions {
  std::vector<double> levels = {0.25, 0.4, 0.5, 0.65};
  std::vector<model::Mode> modes = {model::Mode::uniform, model::Mode::greedy};
  std::vector<model::Criterion> criteria = {model::Criterion::magnitude};
  int64_t tokens = 8192;         // for the statistics
  int64_t sparse_tokens = 2048;  // of them run again for each mode and level (sparse_quantiles.h); 0: none
  int64_t ctx = 2048;
  int64_t skipped = 4;  // first positions of a window: dense in use, so not in the statistics
  int64_t group = 1;    // inputs that are left out together
  int64_t search_windows = 2, search_window = 256;  // tokens that the search sees, from the text's beginning
  int64_t sensitivity_tokens = 256;                 // for mode layered, after those
  SearchOptions search;
  bool progress = true;
};

struct Calibration {
  model::ThresholdSet set;
  Statistics statistics;
};

/// ids: the calibration text. Throws Error when it has fewer tokens than the search needs; fewer than options.tokens
/// are taken as they are (statistics.tokens tells). The subject is a model of this checkpoint, and dense afterwards.
Calibration calibrate(Subject& subject, const io::Checkpoint& checkpoint, std::span<const int32_t> ids,
                      const std::string& text_sha256, const CalibrateOptions& options);

}  // namespace lacuna::calibrate
