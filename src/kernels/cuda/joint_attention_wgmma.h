// src/kernels/cuda/joint_attention_wgmma.h - joint attention with wgmma, for devices of compute capability 9.0.
#pragma once

#include "kernels/cuda/image_ops.h"

namespace lacuna::cuda {

/// Whether launch_joint_attention_wgmma takes arguments that launch_joint_attention takes: heads of more than 64 values,
/// of which whole pieces of 16 bytes are written, and outputs aligned to 16 bytes.
bool takes_joint_attention_wgmma(const JointAttentionArgs& args);

/// As launch_joint_attention. Throws Error where the driver refuses the tensor maps of the rows.
void launch_joint_attention_wgmma(const Device& device, Stream& stream, const JointAttentionArgs& args);

}  // namespace lacuna::cuda
