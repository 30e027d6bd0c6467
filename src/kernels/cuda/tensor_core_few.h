// src/kernels/cuda/tensor_core_few.h - the kernel of tensor_core.h for a few tokens.
#pragma once

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// args: checked, of TensorCoreKernel::few. Sums are float32 whatever `accumulate` says.
void launch_tensor_core_few(const Device& device, Stream& stream, const TensorCoreArgs& args);

}  // namespace lacuna::cuda
