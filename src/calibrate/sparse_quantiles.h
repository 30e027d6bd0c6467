// src/calibrate/sparse_quantiles.h - thresholds from what the layers of a sparse model read.
//
// Quantiles of the dense model's inputs leave out another share once they are in use: what the layers before left out
// changes what a layer reads (SmolLM2-135M, asked for 65% everywhere, leaves out 70%, one layer 81%). So the text runs
// once more with every input thresholded, each by the quantile of what it has read so far.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "calibrate/statistics.h"
#include "calibrate/subject.h"
#include "model/sparsity.h"

namespace lacuna::calibrate {

using Shares = std::vector<std::array<double, model::kInputs>>;  // [layers], of each input

/// Sets thresholds.t and .realised so that `shares` of the inputs are left out of these ids (in windows, as
/// collect_statistics runs them) when all layers leave theirs out. thresholds: criterion and, for wina, norms are
/// given. The model is dense afterwards. Throws Error for values that are not finite.
void take_sparse_quantiles(Subject& subject, std::span<const int32_t> ids, const Shares& shares,
                           const StatisticsOptions& options, model::Thresholds& thresholds);

/// Shares of the inputs that these thresholds leave out of these ids, when all layers leave theirs out:
/// [layers][inputs]. The model is dense afterwards.
model::PerInput realised_shares(Subject& subject, std::span<const int32_t> ids, const model::Thresholds& thresholds,
                                const StatisticsOptions& options);

}  // namespace lacuna::calibrate
