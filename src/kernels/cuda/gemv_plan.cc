// src/kernels/cuda/gemv_plan.cc - what can be said of plans in every build.
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/gemv.h"

namespace lacuna::cuda {

std::string describe(const GemvPlan& plan) {
  if (!plan.skips) return "dense: skipping does not pay";
  return fmt::format(
      "{} segments, {} warps, {} columns in flight, {} resident, {:.0f}% of headers and {:.0f}% of codes early",
      plan.segments, plan.warps, plan.chunk, plan.resident, 100 * plan.early_headers, 100 * plan.early_codes);
}

GemvPlan filled(const DeviceInfo& device, const Columns& weights, GemvPlan plan, double share) {
  const int64_t K = weights.K, least = (K + kSegmentColumns - 1) / kSegmentColumns;
  const double all = share * device.multiprocessors * plan.resident / plan.warps;
  const int64_t most = std::max(least, std::min(K / 16, kMostSegments));
  plan.segments = int(std::clamp(int64_t(all / double(std::max<int64_t>(1, weights.rows))), least, most));
  return plan;
}

}  // namespace lacuna::cuda
