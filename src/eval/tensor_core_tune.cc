#include "eval/tensor_core_tune.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace lacuna::eval {

Spread spread_of(std::vector<double> values) {
  if (values.empty()) throw Error("the spread of no values");
  std::ranges::sort(values);
  const size_t n = values.size(), quarter = n / 4;
  return {(values[(n - 1) / 2] + values[n / 2]) / 2, values[n - 1 - quarter] - values[quarter]};
}

size_t choose_plan(std::span<const PlanTimes> plans) {
  size_t best = 0;
  double most = 0;
  const double standard = spread_of(plans.front().us).median;
  for (size_t i = 1; i < plans.size(); ++i) {
    if (spread_of(plans[i].us).median >= standard) continue;
    std::vector<double> gains;
    for (size_t round = 0; round < plans[i].us.size(); ++round)
      gains.push_back(plans.front().us.at(round) - plans[i].us[round]);
    const Spread gain = spread_of(std::move(gains));
    if (gain.median > std::max(gain.quartiles, most)) best = i, most = gain.median;
  }
  return best;
}

cuda::TensorCoreTuning ProductTimes::tuning() const {
  return {product, plans[chosen].plan, spread_of(plans.front().us).median, spread_of(plans[chosen].us).median};
}

namespace {

/// The device's plans for the product, the default one first.
std::vector<PlanTimes> plans_of(const cuda::DeviceInfo& device, const cuda::TensorCoreProduct& product) {
  std::vector<PlanTimes> out = {
      {default_plan(device, product.operation, product.accumulate, product.M, product.N, product.groups), {}}};
  for (const cuda::TensorCorePlan& plan : cuda::tensor_core_plans(product.operation, product.accumulate))
    if (plan != out.front().plan) out.push_back({plan, {}});
  return out;
}

/// Throws Error where a plan's results are not the default's, but for rounding. Returns the default's error.
double check(TensorCoreCase& of, cuda::TensorCoreArgs args, const ProductTimes& times) {
  const auto refuse = [&](const cuda::TensorCorePlan& plan, double off, const char* of_what) {
    throw Error("{}: with {} the result is off by {:.2e} of {}; the kernel is wrong here", describe(times.product),
                describe(plan), off, of_what);
  };
  args.plan = &times.plans.front().plan;
  const double error = of.error(args);
  if (!(error < kMostTensorCoreError)) refuse(*args.plan, error, "itself");
  const std::vector<bf16> expected = of.results(args);
  for (const PlanTimes& other : std::span(times.plans).subspan(1)) {
    args.plan = &other.plan;
    const double off = relative_difference(of.results(args), expected);
    if (off != 0) refuse(other.plan, off, "what the default plan gives");  // all sum in one order
  }
  return error;
}

}  // namespace

ProductTimes tune_tensor_core(TensorCoreCase& of, cuda::Accumulate accumulate, const TensorCoreTuneOptions& options) {
  const cuda::DeviceInfo& device = of.device().info();
  cuda::TensorCoreArgs args = of.arguments(accumulate);
  const auto product = planned_product(device, args);
  if (!product) throw Error("{} runs no plan of the wgmma kernel for this product", device.name);
  ProductTimes out{.product = *product, .plans = plans_of(device, *product)};
  out.error = check(of, args, out);

  constexpr int64_t kLeast = 8, kMost = 256;  // launches of a graph
  args.plan = &out.plans.front().plan;
  cuda::Graph first = of.record(args, kLeast);
  of.time(first);
  const double ms = std::max(of.time(first), 1e-3);
  const auto launches = std::clamp(int64_t(std::ceil(double(kLeast) * options.graph_ms / ms)), kLeast, kMost);
  std::vector<cuda::Graph> graphs;
  for (const PlanTimes& times : out.plans) {
    args.plan = &times.plan;
    graphs.push_back(of.record(args, launches));
    of.time(graphs.back());  // warms up
  }
  for (int round = 0; round < options.rounds; ++round)
    for (size_t i = 0; i < graphs.size(); ++i) {
      const size_t turn = round % 2 == 0 ? i : graphs.size() - 1 - i;
      const size_t at = (turn + size_t(round / 2)) % graphs.size();
      out.plans[at].us.push_back(1e3 * of.time(graphs[at]) / double(launches));
    }
  out.chosen = choose_plan(out.plans);
  return out;
}

}  // namespace lacuna::eval
