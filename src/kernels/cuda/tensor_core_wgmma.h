// src/kernels/cuda/tensor_core_wgmma.h - the wgmma kernel of tensor_core.h, for devices of compute capability 9.0.
#pragma once

#include "kernels/cuda/share.h"
#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

inline constexpr int kMostSplit = 4;
/// Whether tiles of a last round of ungrouped products may be split by tokens. full: sums in registers beside those of
/// the tensor core.
LACUNA_HOST_DEVICE constexpr bool splits_last_round(const TensorCorePlan& plan, bool full) {
  return plan.tokens == 256 && !full;
}
/// Parts of each of the `rest` tiles that `rounds` whole rounds of all clusters leave, so that they still fit one
/// round. After a single one a part would wait for the results of a whole tile: 512 tokens of 12288 outputs took a
/// third longer so on an H200.
LACUNA_HOST_DEVICE constexpr int split_of_last_round(int64_t rounds, int64_t rest, int64_t clusters) {
  if (rounds < 2 || rest == 0 || 2 * rest > clusters) return 1;
  return 4 * rest > clusters ? 2 : kMostSplit;
}

/// As launch_tensor_core, arguments checked; WriteBack::separate: a.workspace gets the sums, no more. Throws Error for
/// a plan that is none of tensor_core_plans.
void launch_tensor_core_wgmma(const Device& device, Stream& stream, const TensorCoreArgs& args,
                              const TensorCorePlan& plan);

}  // namespace lacuna::cuda
