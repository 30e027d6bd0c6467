#include "calibrate/tuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "calibrate/cold_group.h"
#include "core/error.h"
#include "core/machine.h"
#include "core/progress.h"
#include "core/rng.h"
#include "layout/zigzag.h"
#include "model/weight_groups.h"

namespace lacuna::calibrate {
namespace {

using kernels::Plan;
using Clock = std::chrono::steady_clock;

// Where the system does not say how large its caches are.
constexpr int64_t kLeastColdBytes = int64_t{256} << 20;
/// A plan that gains less than this is not worth leaving the default for, however sure the gain is.
constexpr double kLeastGain = 0.01;

/// Rounds of measuring every plan that is left, each round all of them once, in an order of its own.
struct Stage {
  size_t keep;   // plans, the default not counted
  double until;  // share of the group's time that is spent when it ends
  int least;     // rounds
};
constexpr Stage kStages[] = {{std::numeric_limits<size_t>::max(), 0.4, 2}, {12, 0.65, 3}, {4, 1, 5}};

double median(std::vector<double> values) {
  const auto half = values.begin() + int64_t(values.size() / 2);
  std::nth_element(values.begin(), half, values.end());
  if (values.size() % 2) return *half;
  return 0.5 * (*half + *std::max_element(values.begin(), half));
}

/// Standard error of a median, from the median deviation, so that a few wild values do not count.
double median_error(const std::vector<double>& values) {
  const double middle = median(values);
  std::vector<double> deviations;
  for (const double v : values) deviations.push_back(std::abs(v - middle));
  return 1.2533 * 1.4826 * median(std::move(deviations)) / std::sqrt(double(values.size()));
}

/// One plan's measurements. Points: dense, then the levels.
struct Candidate {
  Plan plan;
  std::vector<std::vector<double>> ms, ratios;  // [points][rounds]; ratios to the default plan of the same round
  double score = 1;

  Candidate(const Plan& p, size_t points) : plan(p), ms(points), ratios(points) {}
  void forget() {
    for (auto& values : ms) values.clear();
    for (auto& values : ratios) values.clear();
  }
};

/// Times at each point: what the default plan takes, times the median ratio.
std::vector<double> point_times(const Candidate& candidate, const Candidate& standard) {
  std::vector<double> out;
  for (size_t p = 0; p < candidate.ratios.size(); ++p)
    out.push_back(median(standard.ms[p]) * median(candidate.ratios[p]));
  return out;
}

/// The mean over dense and all levels, as a geometric one, of the time in use (dense where skipping is slower) relative
/// to the default plan's.
double score_of(const Candidate& candidate, const Candidate& standard) {
  const std::vector<double> own = point_times(candidate, standard), other = point_times(standard, standard);
  double sum = 0;
  int points = 0;
  for (size_t p = 0; p < own.size(); ++p) {
    if (p == 1) continue;  // a list of all inputs: only says where skipping begins to pay
    sum += std::log(std::min(own[p], own[0]) / std::min(other[p], other[0]));
    ++points;
  }
  return std::exp(sum / points);
}

double score_error(const Candidate& candidate) {
  double squares = 0;
  for (const auto& ratios : candidate.ratios) squares += median_error(ratios) * median_error(ratios);
  return std::sqrt(squares) / double(candidate.ratios.size());
}

PlanTimes times_of(const Candidate& candidate, const Candidate& standard) {
  std::vector<double> points = point_times(candidate, standard);
  return {candidate.plan, points[0], {points.begin() + 1, points.end()}, int(candidate.ratios[0].size())};
}

/// Measures one group's plans and chooses.
class GroupTuner {
 public:
  GroupTuner(ColdGroup& group, std::vector<Plan> plans, std::vector<double> levels, const TuneOptions& options)
      : group_(group), levels_(std::move(levels)), options_(options), rng_(uint64_t(group.rows())) {
    group_.prepare(plans);
    for (const Plan& plan : plans) left_.emplace_back(plan, levels_.size() + 1);
  }

  /// done(share): how much of the group's time has gone.
  template <class Done>
  void measure(GroupTuning& out, const Done& done) {
    std::vector<Candidate> dropped;
    const auto start = Clock::now();
    for (const Stage& stage : kStages) {
      while (left_.size() > 1 && left_.size() - 1 > stage.keep) {
        dropped.push_back(std::move(left_.back()));
        left_.pop_back();
      }
      group_.keep(plans_left());
      for (Candidate& candidate : left_) candidate.forget();  // chosen for being fast: what comes is unbiased
      for (int round = 0;; ++round) {
        const double spent = std::chrono::duration<double>(Clock::now() - start).count() / options_.seconds;
        if (round >= stage.least && spent >= stage.until) break;
        measure_round();
        done(std::min(spent, stage.until));
      }
      for (Candidate& candidate : left_) candidate.score = score_of(candidate, left_.front());
      std::stable_sort(left_.begin() + 1, left_.end(),
                       [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
    }
    const Candidate& standard = left_.front();
    const Candidate* best = &standard;
    if (left_.size() > 1) {
      const double error = score_error(left_[1]);
      if (left_[1].score < 1 - std::max(kLeastGain, 2 * error)) best = &left_[1], out.noise = error;
    }
    for (const Candidate& candidate : left_) out.measured.push_back(times_of(candidate, standard));
    for (auto d = dropped.rbegin(); d != dropped.rend(); ++d) out.measured.push_back(times_of(*d, standard));
    const PlanTimes times = times_of(*best, standard);
    out.plan = best->plan;
    out.plan.dense_below = dense_below(times.dense_ms, levels_, times.sparse_ms);
  }

 private:
  std::vector<Plan> plans_left() const {
    std::vector<Plan> plans;
    for (const Candidate& candidate : left_) plans.push_back(candidate.plan);
    return plans;
  }

  void measure_round() {
    std::vector<size_t> order(left_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng_.below(i)]);
    for (size_t point = 0; point <= levels_.size(); ++point) {
      std::vector<double> ms(left_.size());
      for (const size_t i : order) ms[i] = group_.time_ms(left_[i].plan, int(point) - 1);
      for (size_t i = 0; i < left_.size(); ++i) {
        left_[i].ms[point].push_back(ms[i]);
        left_[i].ratios[point].push_back(ms[i] / ms[0]);
      }
    }
  }

  ColdGroup& group_;
  std::vector<double> levels_;
  const TuneOptions& options_;
  Rng rng_;
  std::vector<Candidate> left_;  // the default plan first
};

/// A distinct group and all layers that have it.
struct Distinct {
  std::string key, name;
  int64_t bytes = 0;
  std::vector<std::vector<kernels::WeightView>> layers;
};

std::vector<Distinct> distinct_groups(const io::Checkpoint& checkpoint) {
  std::vector<Distinct> out;
  std::set<std::string> others;  // layouts
  for (int64_t layer = 0; layer < model::layer_count(checkpoint); ++layer) {
    for (model::WeightGroup& group : model::layer_groups(checkpoint, layer)) {
      bool zigzag = true;
      for (const kernels::WeightView& part : group.parts) {
        if (part.layout->zigzag) continue;
        zigzag = false;
        others.insert(std::string(part.layout->name));
      }
      if (!zigzag) continue;
      const std::string key = group.key();
      auto found = std::find_if(out.begin(), out.end(), [&](const Distinct& d) { return d.key == key; });
      if (found == out.end()) found = out.insert(out.end(), {key, group.name, group.bytes(), {}});
      found->layers.push_back(std::move(group.parts));
    }
  }
  if (out.empty()) {
    std::string layouts, known;
    for (const std::string& name : others) layouts += (layouts.empty() ? "" : ", ") + name;
    for (const layout::Layout& layout : layout::all())
      if (layout.zigzag) known += (known.empty() ? "" : ", ") + std::string(layout.name);
    throw Error(
        "{}: there is nothing to tune: its layers are {}, and only the zigzag layouts ({}) can be run in several ways; "
        "make such a file with `lacuna quantize MODEL --layout zz4_k -o FILE`",
        checkpoint.path(), layouts.empty() ? "without matrices" : layouts, known);
  }
  return out;
}

}  // namespace

const PlanTimes& GroupTuning::chosen() const {
  for (const PlanTimes& times : measured) {
    Plan same = times.plan;
    same.dense_below = plan.dense_below;
    if (same == plan) return times;
  }
  return standard();
}

std::vector<Plan> candidate_plans(int64_t rows, int threads) {
  std::vector<int64_t> tiles = {0};
  const int64_t per_thread = (rows + threads - 1) / threads * layout::kSuperRows;
  for (const int64_t tile : {int64_t{256}, int64_t{1024}, int64_t{2048}, per_thread})
    if (tile < rows * layout::kSuperRows && std::find(tiles.begin(), tiles.end(), tile) == tiles.end())
      tiles.push_back(tile);
  std::vector<Plan> out = {kernels::default_plan()};
  for (const int64_t tile_rows : tiles)
    for (const Plan::Split split : {Plan::Split::columns, Plan::Split::rows})
      for (const int chunk : {16, 32, 48, 64})
        for (const int prefetch : {4, 16, Plan::kColumn, 0}) {
          if (split == Plan::Split::rows && rows < threads) continue;  // workers without rows
          // In columns as short as that all distances are the same.
          const int64_t height = tile_rows == 0 ? rows : tile_rows / layout::kSuperRows;
          if (prefetch != Plan::kColumn && prefetch >= height) continue;
          const Plan plan{.split = split, .chunk = chunk, .prefetch = prefetch, .tile_rows = tile_rows};
          if (plan != out.front()) out.push_back(plan);
        }
  return out;
}

double dense_below(double dense_ms, const std::vector<double>& levels, const std::vector<double>& sparse_ms) {
  for (size_t i = levels.size(); i-- > 0;) {
    if (sparse_ms[i] < dense_ms) continue;
    if (i + 1 == levels.size()) return 1;
    const double above = sparse_ms[i] - dense_ms, below = dense_ms - sparse_ms[i + 1];
    return levels[i] + (levels[i + 1] - levels[i]) * above / (above + below);
  }
  return 0;
}

std::vector<GroupTuning> tune(const io::Checkpoint& checkpoint, ThreadPool& pool, const TuneOptions& options) {
  for (size_t i = 0; i < options.levels.size(); ++i)
    if (!(options.levels[i] > (i == 0 ? 0 : options.levels[i - 1]) && options.levels[i] < 1))
      throw Error("levels to tune at must ascend, each above 0 and below 1; found {}", options.levels[i]);
  std::vector<double> levels = {0};
  levels.insert(levels.end(), options.levels.begin(), options.levels.end());
  const std::vector<Distinct> groups = distinct_groups(checkpoint);

  constexpr int64_t kSteps = 1000;  // of progress, a group
  std::optional<Progress> progress;
  if (options.progress) progress.emplace("Tuning", int64_t(groups.size()) * kSteps, "steps");
  const int64_t cold_bytes =
      options.cold_bytes > 0 ? options.cold_bytes : std::max(kLeastColdBytes, 2 * last_level_cache_bytes());
  std::vector<GroupTuning> out;
  for (const Distinct& group : groups) {
    ColdGroup cold(group.layers, levels, cold_bytes, pool);
    GroupTuner tuner(cold, candidate_plans(cold.rows(), pool.size()), levels, options);
    GroupTuning& tuning = out.emplace_back();
    tuning.key = group.key;
    tuning.name = group.name;
    tuning.bytes = group.bytes;
    tuning.levels = levels;
    const int64_t before = int64_t(out.size() - 1) * kSteps;
    tuner.measure(tuning, [&](double share) {
      if (progress) progress->set(before + int64_t(share * double(kSteps)));
    });
  }
  return out;
}

}  // namespace lacuna::calibrate
