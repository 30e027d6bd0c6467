#include "kernels/plan.h"

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/linear.h"
#include "layout/zigzag.h"

namespace lacuna::kernels {

Plan default_plan() {
  Plan plan;
  if (cpu::prefetches_far()) plan.chunk = 64, plan.prefetch = 4;
  return plan;
}

std::string_view name_of(Plan::Split split) { return split == Plan::Split::columns ? "columns" : "rows"; }

void check_plan(const Plan& plan) {
  if (plan.chunk != 16 && plan.chunk != 32 && plan.chunk != 48 && plan.chunk != 64)
    throw Error("a plan with chunk = {}; it must be 16, 32, 48 or 64", plan.chunk);
  if (plan.prefetch < 0 || plan.prefetch > Plan::kColumn)
    throw Error("a plan with prefetch = {}; it must be 0 to {}", plan.prefetch, Plan::kColumn);
  if (plan.tile_rows < 0 || plan.tile_rows % layout::kSuperRows != 0)
    throw Error("a plan with tile_rows = {}; it must be 0 or a multiple of {}", plan.tile_rows, layout::kSuperRows);
  if (!(plan.dense_below >= 0 && plan.dense_below <= 1))
    throw Error("a plan with dense_below = {}; it must be a share from 0 to 1", plan.dense_below);
}

std::string describe(const Plan& plan) {
  const std::string ahead = plan.prefetch == 0               ? "no prefetch"
                            : plan.prefetch == Plan::kColumn ? "a column ahead"
                                                             : fmt::format("{} superblocks ahead", plan.prefetch);
  return fmt::format("{}, {} at a time, {}, {}", name_of(plan.split), plan.chunk, ahead,
                     plan.tile_rows == 0 ? "whole columns" : fmt::format("tiles of {} outputs", plan.tile_rows));
}

std::string plan_key(std::span<const WeightView> parts) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i == 0)
      out += fmt::format("{} {}", parts[i].layout->name, parts[i].shape.N);
    else if (parts[i].layout == parts[i - 1].layout)
      out += fmt::format("+{}", parts[i].shape.N);
    else
      out += fmt::format("+{} {}", parts[i].layout->name, parts[i].shape.N);
  }
  if (!parts.empty()) out += fmt::format(" x {}", parts[0].shape.K);
  return out;
}

Plan Plans::of(std::span<const WeightView> parts) const {
  const auto found = plans_.find(plan_key(parts));
  return found == plans_.end() ? default_plan() : found->second;
}

}  // namespace lacuna::kernels
