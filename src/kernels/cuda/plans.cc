#include "kernels/cuda/plans.h"

#include <algorithm>
#include <cstdlib>

#include "core/error.h"
#include "kernels/cuda/units_form.h"

namespace lacuna::cuda {

std::string describe(const Product& product) {
  return fmt::format("{} {} x {}{}", layout::get(product.layout).name, product.rows, product.K,
                     product.percent == 0 ? ", dense" : fmt::format(", {}%", product.percent));
}

bool GroupsProduct::are_units() const { return has_units(layout::get(layout), group, K); }

std::string describe(const GroupsProduct& product) {
  return fmt::format("{} {} x {}, groups of {}, {}% kept", layout::get(product.layout).name, product.rows, product.K,
                     product.group, product.kept);
}

void check_plan(const GroupsProduct& product, const GroupsPlan& plan) {
  const bool units = product.are_units();
  const auto kernels = groups_plans(layout::get(product.layout), units);
  if (std::ranges::none_of(kernels, [&](const GroupsPlan& kernel) {
        return kernel.warps == plan.warps && kernel.resident == plan.resident && kernel.math == plan.math;
      }))
    throw Error("{}: no kernel has the plan {}", describe(product), describe(plan));
  if (plan.blocks < 1 || (plan.split == Split::slice && !units && plan.blocks % product.rows != 0))
    throw Error("{}: {} blocks of slice-K are no multiple of the {} panels", describe(product), plan.blocks,
                product.rows);
}

const GemvPlan* Plans::find(const Product& product) const {
  const GemvPlan* best = nullptr;
  int distance = 0;
  for (const auto& [other, plan] : plans_) {
    if (other.layout != product.layout || other.rows != product.rows || other.K != product.K) continue;
    if ((other.percent == 0) != (product.percent == 0)) continue;
    if (!plan.skips && other.percent < product.percent) continue;
    const int far = std::abs(other.percent - product.percent);
    if (best == nullptr || far < distance) best = &plan, distance = far;
  }
  return best;
}

const GroupsPlan* Plans::find_groups(const GroupsProduct& product) const {
  const GroupsPlan* best = nullptr;
  int distance = 0;
  for (const auto& [other, plan] : of_groups_) {
    GroupsProduct same = other;
    same.kept = product.kept;
    if (!(same == product)) continue;
    const int far = std::abs(other.kept - product.kept);
    if (best == nullptr || far < distance) best = &plan, distance = far;
  }
  return best;
}

}  // namespace lacuna::cuda
