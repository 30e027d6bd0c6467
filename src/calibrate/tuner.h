// src/calibrate/tuner.h - which plan multiplies each group of a model's zigzag weights fastest on this machine, and
// from which sparsity on skipping pays (SpQt, section 4.3). Every candidate's result is compared with the default
// plan's before anything is timed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/plan.h"

namespace lacuna::calibrate {

struct TuneOptions {
  /// Shares of inactive inputs to measure, ascending, each in (0, 1).
  std::vector<double> levels = {0.25, 0.4, 0.5, 0.65};
  /// Of measuring, for each distinct group. More makes finer differences visible.
  double seconds = 12;
  /// Bytes of weights, in each tile form, that runs go through in turn, so that no cache holds the next; 0: twice the
  /// last-level cache, since the default plan's form and the others' are run alternately.
  int64_t cold_bytes = 0;
  bool progress = true;
};

/// What a plan takes for one token. Where a plan was measured together with the default one, these are the default's
/// median times the median of the ratios to it in the same round: a machine that slows down meanwhile favours no plan.
struct PlanTimes {
  kernels::Plan plan;
  double dense_ms = 0;
  /// With a share of the inputs inactive, collecting the active ones included; [0] is share 0 (every input on the
  /// list), then the levels.
  std::vector<double> sparse_ms;
  int rounds = 0;

  bool operator==(const PlanTimes&) const = default;
};

struct GroupTuning {
  std::string key;                  // kernels::plan_key
  std::string name;                 // "attn_q+attn_k+attn_v"
  int64_t bytes = 0;                // of its weights
  std::vector<double> levels;       // of PlanTimes::sparse_ms, so levels[0] == 0
  kernels::Plan plan;               // the chosen one, with its dense_below
  std::vector<PlanTimes> measured;  // the default plan first, then the others, the fastest first
  double noise = 0;                 // standard error of the chosen plan's time, relative

  /// Times of the chosen plan; of the default one.
  const PlanTimes& chosen() const;
  const PlanTimes& standard() const { return measured.front(); }

  bool operator==(const GroupTuning&) const = default;
};

/// Plans that make sense for a group of `rows` superblock rows (256 outputs each) on so many threads; the default
/// first.
std::vector<kernels::Plan> candidate_plans(int64_t rows, int threads);

/// The least share of inactive inputs from which on skipping is faster than dense, between the measured levels by
/// interpolation: 0 where even a list of all inputs is, 1 where no level is. levels: ascending.
double dense_below(double dense_ms, const std::vector<double>& levels, const std::vector<double>& sparse_ms);

/// Measures every distinct group of zigzag weights of the model's layers. Throws Error when it has none, and when a
/// plan's result is wrong.
std::vector<GroupTuning> tune(const io::Checkpoint& checkpoint, ThreadPool& pool, const TuneOptions& options);

}  // namespace lacuna::calibrate
