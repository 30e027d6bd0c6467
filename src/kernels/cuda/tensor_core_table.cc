#include "kernels/cuda/tensor_core_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.h"

namespace lacuna::cuda {

const layout::Layout& layout_of(Operation operation) {
  using layout::Id;
  if (operation.eight_bits) return layout::get(operation.sparse ? Id::nm24_f8 : Id::f8);
  return layout::get(operation.sparse ? Id::nm24_bf16 : Id::bf16);
}

std::string describe(const TensorCoreProduct& product) {
  std::string out = fmt::format("{} {} x {} x {}", layout_of(product.operation).name, product.M, product.N, product.K);
  if (product.groups > 0) out += fmt::format(", {} groups", product.groups);
  return product.accumulate == Accumulate::full ? out + ", full accumulation" : out;
}

std::string describe(const TensorCorePlan& plan) {
  return fmt::format("{} outputs x {} tokens, {}", plan.rows, plan.tokens,
                     plan.cluster > 1 ? fmt::format("clusters of {}", plan.cluster) : "no clusters");
}

const TensorCoreTuning* TensorCoreTable::find(const TensorCoreProduct& product) const {
  const auto ratio = [&](const TensorCoreProduct& known) {
    return double(std::max(known.M, product.M)) / double(std::max<int64_t>(std::min(known.M, product.M), 1));
  };
  const auto is_near = [&](const TensorCoreProduct& known) {
    TensorCoreProduct same = known;
    same.M = product.M;
    return same == product && ratio(known) <= kMostTokenRatio;
  };
  const auto above = tunings_.lower_bound(product);
  const TensorCoreTuning* out = above != tunings_.end() && is_near(above->first) ? &above->second : nullptr;
  if (above == tunings_.begin()) return out;
  const auto below = std::prev(above);
  if (!is_near(below->first) || (out != nullptr && ratio(above->first) <= ratio(below->first))) return out;
  return &below->second;
}

void TensorCoreTable::check_plans(std::string_view where) const {
  for (const auto& [product, tuning] : tunings_) {
    const std::span<const TensorCorePlan> plans = tensor_core_plans(product.operation, product.accumulate);
    if (std::ranges::count(plans, tuning.plan) == 0)
      throw Error("{}: {}: the wgmma kernel{} has no plan of {}", where, describe(product),
                  plans.empty() ? ", which this build lacks," : "", describe(tuning.plan));
  }
}

const TensorCorePlan* find_plan(const TensorCoreTable& table, const DeviceInfo& device, const TensorCoreArgs& args) {
  if (table.empty()) return nullptr;
  const auto product = planned_product(device, args);
  const TensorCoreTuning* const found = product ? table.find(*product) : nullptr;
  return found == nullptr ? nullptr : &found->plan;
}

std::string explain_tensor_core(const DeviceInfo& device, TensorCoreArgs args, const TensorCoreTable& table) {
  const auto product = planned_product(device, args);
  const TensorCoreTuning* const found = product ? table.find(*product) : nullptr;
  if (found != nullptr) args.plan = &found->plan;
  std::string out = explain_tensor_core(device, args);
  if (!product) return out;
  if (found == nullptr) return out + "; plan by the model of rounds of blocks";
  return out + fmt::format("; plan measured at {} tokens: {:.1f} us, the model's {:.1f} us", found->product.M,
                           found->tuned_us, found->standard_us);
}

}  // namespace lacuna::cuda
