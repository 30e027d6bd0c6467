// src/kernels/cuda/gemv_plan.cc - what can be said of plans in every build.
#include "core/error.h"
#include "kernels/cuda/gemv.h"

namespace lacuna::cuda {

std::string describe(const GemvPlan& plan) {
  return fmt::format(
      "{} segments, {} warps, {} columns in flight, {} resident, {:.0f}% of headers and {:.0f}% of codes early",
      plan.segments, plan.warps, plan.chunk, plan.resident, 100 * plan.early_headers, 100 * plan.early_codes);
}

}  // namespace lacuna::cuda
