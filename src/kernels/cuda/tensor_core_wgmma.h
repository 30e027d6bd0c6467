// src/kernels/cuda/tensor_core_wgmma.h - the wgmma kernel of tensor_core.h, for devices of compute capability 9.0.
#pragma once

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// As launch_tensor_core, arguments checked; WriteBack::separate: a.workspace gets the sums, no more. Throws Error for
/// a plan that is none of tensor_core_plans.
void launch_tensor_core_wgmma(const Device& device, Stream& stream, const TensorCoreArgs& args,
                              const TensorCorePlan& plan);

}  // namespace lacuna::cuda
