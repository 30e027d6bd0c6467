#include "calibrate/cold_group.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/active.h"
#include "layout/zigzag.h"

namespace lacuna::calibrate {
namespace {

using kernels::Plan;
using kernels::WeightView;
using Clock = std::chrono::steady_clock;

constexpr double kBatchMs = 0.5;
constexpr size_t kInputs = 8;         // different lists, as in use
constexpr int64_t kMostCopies = 512;  // of a tiny group
// Two plans differ in which factors are rounded together, to 16 bits against the largest of a chunk.
constexpr double kTolerance = 0.005;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// The threshold below which the share of |x| lies.
float threshold_of(const std::vector<float>& x, double share) {
  if (share == 0) return 0;
  std::vector<float> magnitudes;
  for (const float value : x) magnitudes.push_back(std::abs(value));
  const auto at = magnitudes.begin() + int64_t(share * double(x.size()));
  std::nth_element(magnitudes.begin(), at, magnitudes.end());
  return *at;
}

/// Root mean square difference relative to what is expected; NaN where anything found is.
double deviation(const std::vector<float>& found, const std::vector<float>& expected) {
  double error = 0, norm = 0;
  for (size_t n = 0; n < found.size(); ++n) {
    const double d = double(found[n]) - double(expected[n]);
    error += d * d;
    norm += double(expected[n]) * double(expected[n]);
  }
  return std::sqrt(error / std::max(norm, 1e-30));
}

}  // namespace

ColdGroup::ColdGroup(std::vector<std::vector<WeightView>> layers, std::span<const double> levels, int64_t cold_bytes,
                     ThreadPool& pool)
    : pool_(pool), layers_(std::move(layers)), levels_(int(levels.size())), K_(kernels::check_weights(layers_[0])) {
  int64_t bytes = 0;
  for (const WeightView& part : layers_[0]) {
    rows_ += layout::super_rows(part.shape.N);
    bytes += int64_t(part.bytes.size());
    y_.emplace_back(size_t(part.shape.N));
  }
  for (size_t i = 0; i < y_.size(); ++i) outputs_.push_back({y_[i].data(), layers_[0][i].shape.N});
  active_.resize(size_t(K_));
  if (bytes == 0) throw Error("a group of linear layers has no weights");
  copies_ = size_t(std::clamp<int64_t>((cold_bytes + bytes - 1) / bytes, 2, kMostCopies));
  Rng rng(uint64_t(K_) * 31 + uint64_t(rows_));
  for (size_t i = 0; i < kInputs; ++i) {
    Input& input = inputs_.emplace_back();
    input.x.resize(size_t(K_));
    for (float& x : input.x) x = float(rng.normal());
    for (const double level : levels) input.thresholds.push_back(threshold_of(input.x, level));
  }
}

ColdGroup::Form ColdGroup::make_form(const Plan& plan) const {
  Form form;
  for (size_t i = 0; i < copies_; ++i) {
    form.copies.push_back(
        kernels::make_cpu_linear_group(layers_[i % layers_.size()], pool_, kernels::Prepare::automatic, plan));
    form.copies.back()->reserve(1);
  }
  return form;
}

void ColdGroup::run(kernels::LinearGroup& group, const Input& input, int level) {
  kernels::Activation x{input.x.data(), 1, K_};
  if (level >= 0) {
    x.active = active_.data();
    x.active_count =
        kernels::collect_active(pool_, x.x, 1, K_, nullptr, input.thresholds[size_t(level)], active_.data());
  }
  group.run(x, outputs_);
}

double ColdGroup::time_ms(const Plan& plan, int level) {
  Form& form = forms_.at(plan.tile_rows);
  const size_t first = form.next;
  form.next += batch_;
  for (size_t i = 0; i < batch_; ++i) form.copies[(first + i) % copies_]->set_plan(plan);
  pool_.run([](int) {});  // wakes the workers
  const auto start = Clock::now();
  for (size_t i = 0; i < batch_; ++i) run(*form.copies[(first + i) % copies_], inputs_[i % kInputs], level);
  return ms_since(start) / double(batch_);
}

std::vector<std::vector<float>> ColdGroup::results(const Plan& plan) {
  kernels::LinearGroup& group = *forms_.at(plan.tile_rows).copies[0];
  group.set_plan(plan);
  std::vector<std::vector<float>> out;
  for (int level = -1; level < levels_; ++level) {
    for (auto& y : y_) std::fill(y.begin(), y.end(), NAN);
    run(group, inputs_[0], level);
    auto& all = out.emplace_back();
    for (const auto& y : y_) all.insert(all.end(), y.begin(), y.end());
  }
  return out;
}

void ColdGroup::prepare(std::span<const Plan> plans) {
  for (const Plan& plan : plans)
    if (!forms_.contains(plan.tile_rows)) forms_.emplace(plan.tile_rows, make_form(plan));
  const auto expected = results(plans[0]);
  for (const Plan& plan : plans) {
    const auto found = results(plan);
    for (size_t i = 0; i < found.size(); ++i)
      if (const double d = deviation(found[i], expected[i]); !(d <= kTolerance))
        throw Error(
            "{}: the plan \"{}\" gives a result that is off by {:.3g} of its size (at most {} allowed); nothing was "
            "timed, please report this",
            layers_[0][0].name, kernels::describe(plan), d, kTolerance);
  }
  for (int i = 0; i < 2; ++i) {  // the first one faults pages of scratch memory in
    const double once = time_ms(plans[0], -1);
    batch_ = size_t(std::clamp<int64_t>(int64_t(kBatchMs / std::max(once, 1e-4)) + 1, 1, int64_t(copies_ / 2)));
  }
}

void ColdGroup::keep(std::span<const Plan> plans) {
  std::erase_if(forms_, [&](const auto& form) {
    return std::none_of(plans.begin(), plans.end(), [&](const Plan& plan) { return plan.tile_rows == form.first; });
  });
}

}  // namespace lacuna::calibrate
