// src/kernels/cuda/tensor_core_mma.h - the launches of tensor_core.h that every device has.
#pragma once

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// The portable kernel. args: checked. Writes y, or of WriteBack::separate the product alone into args.workspace: f32
/// [outputs of a group, M]. Throws Error where the build's code for the device lacks the instruction.
void launch_tensor_core_mma(const Device& device, Stream& stream, const TensorCoreArgs& args);

/// args.workspace *= both scales.
void launch_scale_product(const Device& device, Stream& stream, const TensorCoreArgs& args);
/// args.workspace, scaled, turned into y, with bias, activation, gate and add.
void launch_transpose_product(const Device& device, Stream& stream, const TensorCoreArgs& args);

}  // namespace lacuna::cuda
