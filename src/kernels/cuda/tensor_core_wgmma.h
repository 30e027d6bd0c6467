// src/kernels/cuda/tensor_core_wgmma.h - the wgmma kernel of tensor_core.h, in builds for compute capability 9.0.
#pragma once

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// args: checked. Writes y, or of WriteBack::separate the product alone into args.workspace.
void launch_tensor_core_wgmma(const Device& device, Stream& stream, const TensorCoreArgs& args,
                              const TensorCorePlan& plan);

}  // namespace lacuna::cuda
