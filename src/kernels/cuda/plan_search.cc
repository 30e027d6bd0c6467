#include "kernels/cuda/plan_search.h"

#include <span>

namespace lacuna::cuda {

std::vector<GemvPlan> kernel_candidates(const DeviceInfo& device, const layout::Layout& layout, const Columns& weights,
                                        const GemvPlan& best) {
  std::vector<GemvPlan> out;
  for (GemvPlan kernel : kernel_plans(layout)) {
    kernel.early_headers = best.early_headers, kernel.early_codes = best.early_codes;
    for (const double fill : {0.35, 0.5, 0.66, 0.8, 1.0, 1.5}) out.push_back(filled(device, weights, kernel, fill));
  }
  return out;
}

std::vector<GemvPlan> early_candidates(const GemvPlan& best) {
  std::vector<GemvPlan> out;
  for (const float codes : {0.0f, 0.1f, 0.2f, 0.3f, 0.5f}) {
    GemvPlan& plan = out.emplace_back(best);
    plan.early_headers = 1, plan.early_codes = codes;
  }
  return out;
}

GemvPlan without_early_headers(GemvPlan best) {
  best.early_headers = 0;
  return best;
}

std::vector<GroupsPlan> kernel_candidates(const DeviceInfo& device, const layout::Layout& layout, const Groups& weights,
                                          const GroupsPlan& best) {
  std::vector<GroupsPlan> out;
  const std::span<const GroupsPlan> kernels =
      best.math == Math::fma ? std::span(&best, 1) : groups_plans(layout, weights.are_units());
  for (GroupsPlan plan : kernels) {
    plan.split = best.split, plan.early = best.early;
    const int all = filled(device, weights, plan).blocks;
    for (const double fill : {0.34, 0.5, 0.67, 1.0}) {
      plan.blocks = int(all * fill);
      out.push_back(fitted(weights, plan));
    }
  }
  return out;
}

std::vector<GroupsPlan> early_candidates(const GroupsPlan& best) {
  std::vector<GroupsPlan> out;
  for (const int early : {0, 1, 2, 4, 8, 16, kMostEarly}) out.emplace_back(best).early = early;
  return out;
}

}  // namespace lacuna::cuda
