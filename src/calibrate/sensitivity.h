// src/calibrate/sensitivity.h - the share of each input from what leaving it out does to the whole model's output.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "calibrate/histogram.h"
#include "calibrate/subject.h"
#include "model/sparsity.h"

namespace lacuna::calibrate {

/// KL(dense || sparse) of the next token, in nats, mean over `ids`, when one input of one layer alone leaves out what
/// is below its threshold: [layers][inputs]. thresholds: of every input, used one at a time.
std::vector<std::array<double, model::kInputs>> measure_sensitivity(Subject& subject, std::span<const int32_t> ids,
                                                                    const model::Thresholds& thresholds,
                                                                    int64_t dense_prefix, bool progress);

/// Shares [layers][inputs] with a mean of `level` by weight bytes and the least sum of predicted divergences: that of
/// an input is its measured one, at the share it was measured with, times the energy (sum of squares) below the
/// threshold relative to then. bytes: of the weights that read each input.
std::vector<std::array<double, model::kInputs>> allocate(
    const std::vector<std::array<double, model::kInputs>>& divergence, const model::PerInput& measured_at,
    const std::vector<std::array<Histogram, model::kInputs>>& sizes,
    const std::vector<std::array<int64_t, model::kInputs>>& bytes, double level);

}  // namespace lacuna::calibrate
