#include "eval/group_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/machine.h"
#include "core/rng.h"
#include "eval/bandwidth.h"
#include "layout/zigzag.h"

namespace lacuna::eval {
namespace {

// Inputs may be rounded to 8 bits in blocks of 32 or more: an error of at most 1/254 of the block's largest, spread
// evenly, against values whose root mean square is about a third of it: 3 / 254 / sqrt(3) = 0.7%.
constexpr double kLinearTolerance = 0.02;
/// Of a tiny model: rotating more copies would take minutes and is not what memory looks like in use anyway.
constexpr int64_t kMaxCopies = 256;

using Clock = std::chrono::steady_clock;

/// Checks one group of each combination of shapes and layouts; returns the largest relative error. runner_of(i) gives
/// the runner of group i.
template <class RunnerOf>
double check_kinds(const std::vector<Group>& groups, const RunnerOf& runner_of) {
  std::set<std::vector<std::tuple<const layout::Layout*, int64_t, int64_t>>> seen;
  double worst = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<std::tuple<const layout::Layout*, int64_t, int64_t>> kind;
    for (const kernels::WeightView& part : groups[i].parts) kind.emplace_back(part.layout, part.shape.N, part.shape.K);
    if (seen.insert(std::move(kind)).second) worst = std::max(worst, runner_of(i).check());
  }
  return worst;
}

}  // namespace

std::string BenchRow::label() const {
  return bench == "decode" && act_sparsity > 0 ? fmt::format("{}, {:.0f}% left out", what, 100 * act_sparsity) : what;
}

void set_times(BenchRow& row, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const size_t half = times.size() / 2;
  row.median_ms = times.size() % 2 ? times[half] : 0.5 * (times[half - 1] + times[half]);
  row.min_ms = times.front();
  row.max_ms = times.back();
  row.runs = int(times.size());
}

std::vector<Group> model_groups(const io::Checkpoint& checkpoint) {
  std::vector<Group> groups;
  for (int64_t i = 0; i < model::layer_count(checkpoint); ++i)
    for (Group& group : model::layer_groups(checkpoint, i)) groups.push_back(std::move(group));
  if (groups.empty()) throw Error("{}: the model has no linear layers to time", checkpoint.path());
  return groups;
}

Group head_group(const io::Checkpoint& checkpoint) {
  const io::Tensor* head = checkpoint.find("output.weight");
  Group group;
  group.name = "output";
  group.parts.push_back(model::view_of(head ? *head : checkpoint.require("token_embd.weight")));
  return group;
}

std::string layouts_of(const std::vector<Group>& groups) {
  std::map<std::string_view, int64_t> bytes;
  for (const Group& group : groups)
    for (const kernels::WeightView& part : group.parts) bytes[part.layout->name] += int64_t(part.bytes.size());
  std::vector<std::pair<int64_t, std::string_view>> order;
  for (const auto& [name, size] : bytes) order.emplace_back(-size, name);
  std::sort(order.begin(), order.end());
  std::string out;
  for (const auto& [size, name] : order) {
    if (!out.empty()) out += '+';
    out += name;
  }
  return out;
}

std::optional<double> weight_sparsity_of(const std::vector<Group>& groups) {
  bool drops = false;
  double kept = 0, weights = 0;
  for (const Group& group : groups) {
    for (const kernels::WeightView& part : group.parts) {
      drops = drops || layout::counts_kept(*part.layout) || part.layout->family == layout::Family::two_of_four;
      kept += double(layout::kept_weights(*part.layout, part.shape, part.params));
      weights += double(part.shape.N) * double(part.shape.K);
    }
  }
  return drops ? std::optional(1 - kept / weights) : std::nullopt;
}

double check_result(const kernels::WeightView& weight, const kernels::Activation& input, const float* result) {
  const int64_t N = weight.shape.N;
  std::vector<float> expected(static_cast<size_t>(N));
  kernels::reference_linear(weight, input, {expected.data(), N});
  double error = 0, norm = 0;
  for (int64_t n = 0; n < N; ++n) {
    const double e = expected[size_t(n)], d = result[n] - e;
    error += d * d;
    norm += e * e;
  }
  const double deviation = std::sqrt(error / std::max(norm, 1e-30));
  if (!(deviation <= kLinearTolerance))
    throw Error("{}: the kernel's result is off by {:.3g} of its size (at most {} allowed); nothing was timed",
                weight.name, deviation, kLinearTolerance);
  return deviation;
}

kernels::Plan BenchOptions::plan_of(std::span<const kernels::WeightView> parts) const {
  kernels::Plan plan = plans == nullptr ? kernels::default_plan() : plans->of(parts);
  if (deterministic) plan.split = kernels::Plan::Split::rows;
  return plan;
}

// ---- GroupRunner ----

GroupRunner::GroupRunner(const Group& group, int64_t m, bool copy, ThreadPool& pool, const BenchOptions& options)
    : m_(m), views_(group.parts) {
  if (copy) {
    for (kernels::WeightView& view : views_) {
      HugeBuffer& own = copies_.emplace_back(view.bytes.size());
      std::memcpy(own.data(), view.bytes.data(), view.bytes.size());
      view.bytes = own.bytes();
    }
  }
  const kernels::Plan plan = options.plan_of(views_);
  linear_ = kernels::make_cpu_linear_group(views_, pool, options.prepare, plan);
  linear_->reserve(m);
  const int64_t K = views_[0].shape.K;
  Rng rng(uint64_t(K) * 7919 + uint64_t(m));
  x_.resize(size_t(m * K));
  for (float& x : x_) x = float(rng.normal());
  sparse_ = options.act_sparsity > 0 && options.act_sparsity >= plan.dense_below;
  int64_t together = 1;  // what gs kernels leave out are groups of inputs
  for (const kernels::WeightView& view : views_)
    if (view.layout->family == layout::Family::group_sparse) together = std::max(together, view.params.group_size);
  for (int64_t k = 0; sparse_ && k < K; k += together)
    if (rng.uniform() >= options.act_sparsity)
      for (int64_t i = k; i < std::min(K, k + together); ++i) active_.push_back(int32_t(i));
  for (const kernels::WeightView& view : views_) results_.emplace_back(size_t(m * view.shape.N));
  for (size_t i = 0; i < views_.size(); ++i) outputs_.push_back({results_[i].data(), views_[i].shape.N});
}

int64_t GroupRunner::bytes() const {
  int64_t bytes = linear_->weight_bytes();
  for (const kernels::WeightView& view : views_)
    if (sparse_ && (view.layout->zigzag || view.layout->family == layout::Family::group_sparse))
      bytes -= int64_t(double(view.bytes.size()) * (1 - double(active_.size()) / double(inputs())));
  return bytes;
}

int64_t GroupRunner::outputs() const {
  int64_t n = 0;
  for (const kernels::WeightView& view : views_) n += view.shape.N;
  return n;
}

double GroupRunner::check() {
  for (std::vector<float>& result : results_) std::fill(result.begin(), result.end(), NAN);
  run();
  double worst = 0;
  for (size_t i = 0; i < views_.size(); ++i)
    for (const int64_t row : std::set<int64_t>{0, m_ - 1})
      worst = std::max(worst, check_result(views_[i], input(x_.data() + row * inputs(), 1),
                                           results_[i].data() + row * views_[i].shape.N));
  return worst;
}

kernels::Activation GroupRunner::input(const float* x, int64_t m) const {
  kernels::Activation in{x, m, views_[0].shape.K};
  if (sparse_) {
    in.active = active_.data();
    in.active_count = int64_t(active_.size());
  }
  return in;
}

// ---- timing ----

double check_groups(const std::vector<Group>& groups, ThreadPool& pool, int64_t m, const BenchOptions& options) {
  return check_kinds(groups, [&](size_t i) { return GroupRunner(groups[i], m, false, pool, options); });
}

int64_t cold_copies(int64_t bytes) {
  const int64_t cold = 4 * last_level_cache_bytes();
  return std::clamp<int64_t>((cold + bytes - 1) / std::max<int64_t>(1, bytes), 1, kMaxCopies);
}

BenchRow time_groups(const std::vector<Group>& groups, ThreadPool& pool, int64_t m, const BenchOptions& options) {
  BenchRow row;
  {
    int64_t bytes = 0;
    for (const Group& group : groups) bytes += group.bytes();
    const int64_t copies = cold_copies(bytes);
    std::vector<std::vector<GroupRunner>> rotation;
    for (int64_t c = 0; c < copies; ++c) {
      std::vector<GroupRunner>& runners = rotation.emplace_back();
      for (const Group& group : groups) runners.emplace_back(group, m, copies > 1, pool, options);
    }
    row.deviation = check_kinds(groups, [&](size_t i) -> GroupRunner& { return rotation[0][i]; });
    row.checked = true;
    row.layout = layouts_of(groups);
    row.weight_sparsity = weight_sparsity_of(groups);
    row.m = m;
    double products = 0, inactive = 0;
    for (const GroupRunner& runner : rotation[0]) {
      row.bytes += runner.bytes();
      const double weights = double(runner.outputs()) * double(runner.inputs());
      products += weights;
      inactive += weights * runner.sparsity();
    }
    row.act_sparsity = inactive / std::max(1.0, products);

    std::vector<double> times;
    int64_t next = 0;
    for (int run = -1; run < options.runs; ++run) {  // the first one warms the threads up
      std::vector<GroupRunner>& runners = rotation[size_t(next++ % copies)];
      const auto start = Clock::now();
      for (GroupRunner& runner : runners) runner.run();
      if (run >= 0) times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    set_times(row, std::move(times));
    row.tok_s = double(m) * 1e3 / row.median_ms;
    if (m > 1) row.tflops = 2e-9 * products * double(m) / row.median_ms;
  }
  // After the copies have gone: it needs memory of its own.
  if (m == 1 && options.act_sparsity > 0)
    row.access_ceiling_gb_s = access_ceiling_gb_s(groups, options.act_sparsity, pool);
  return row;
}

std::optional<double> access_ceiling_gb_s(const std::vector<Group>& groups, double sparsity, ThreadPool& pool) {
  std::map<int64_t, double> rates;  // of a column length
  double bytes = 0, ns = 0;
  for (const Group& group : groups) {
    int64_t column = 0;
    for (const kernels::WeightView& part : group.parts) {
      if (!part.layout->zigzag) return std::nullopt;
      column += layout::super_rows(part.shape.N) * part.layout->block_bytes;
    }
    double& rate = rates[column];
    if (rate == 0) rate = measure_column_read_gb_s(pool, column, 1 - sparsity);
    bytes += double(group.bytes());
    ns += double(group.bytes()) / rate;
  }
  return ns > 0 ? std::optional(bytes / ns) : std::nullopt;
}

}  // namespace lacuna::eval
