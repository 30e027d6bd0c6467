// src/eval/realised.h - whether a text leaves out what its thresholds promise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/decoder.h"

namespace lacuna::eval {

/// Differences of shares that texts of other kinds make; past them the figures are not those of the level asked for.
inline constexpr double kWholeBound = 0.02, kLayerBound = 0.05;
/// Of a layer: no difference of texts.
inline constexpr double kWrongThresholds = 0.3;

/// Shares of weight bytes left unread.
struct Realised {
  double asked = 0, share = 0, expected = 0;  // of the whole model; expected: on the calibration text
  std::vector<double> layers, layers_expected;
  int64_t farthest = 0;  // layer
  bool within = true;    // all of it within the bounds
  std::string note;      // what is not, in one line; empty: nothing
};

/// counts: of a decoder that ran `tokens` tokens behind the dense prefix; thresholds: as it holds them. Throws Error
/// when the counts are not of so many tokens in every layer, and when a layer differs by more than kWrongThresholds.
Realised check_realised(const model::SparsityCounts& counts, const model::Thresholds& thresholds, int64_t tokens);

}  // namespace lacuna::eval
