// src/eval/tensor_core_tune.h - which plan of the wgmma kernel is fastest for a product on this device.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "eval/tensor_core_case.h"
#include "kernels/cuda/tensor_core_table.h"

namespace lacuna::eval {

/// Values' middle, and the distance between their quartiles. Throws Error where there are none.
struct Spread {
  double median = 0, quartiles = 0;
};
Spread spread_of(std::vector<double> values);

struct PlanTimes {
  cuda::TensorCorePlan plan;
  std::vector<double> us;  // of one product, a value a round
};

/// The plan that replaces the first one: of those of a smaller median that gain more, in the median of all rounds, than
/// the spread of that gain (a round's times are compared with each other, so that a clock that drifts counts little),
/// the one that gains most; 0: none is.
size_t choose_plan(std::span<const PlanTimes> plans);

struct TensorCoreTuneOptions {
  int rounds = 15;
  double graph_ms = 1;  // least time of one graph of launches
};

/// What was measured of one product.
struct ProductTimes {
  cuda::TensorCoreProduct product;
  std::vector<PlanTimes> plans;  // default_plan's first
  size_t chosen = 0;
  double error = 0;  // of the default plan's sampled results
  cuda::TensorCoreTuning tuning() const;
};

/// Times of every plan that the wgmma kernel has for the case's product, in turn. Results of the default plan are
/// compared with double precision; Error where they differ by more than rounding, where any result of another plan
/// differs from the default's at all, or where the device runs no such plan.
ProductTimes tune_tensor_core(TensorCoreCase& of, cuda::Accumulate accumulate, const TensorCoreTuneOptions& options);

}  // namespace lacuna::eval
