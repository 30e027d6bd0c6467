// src/kernels/cuda/joint_attention_wgmma.h - the wgmma kernel of joint attention, for devices of compute
// capability 9.0.
#pragma once

#include "kernels/cuda/image_ops.h"

namespace lacuna::cuda {

/// What launch_joint_attention checks, and args.kernel, is not looked at again. Throws Error where the driver refuses a
/// tensor map of the rows.
void launch_joint_attention_wgmma(const Device& device, Stream& stream, const JointAttentionArgs& args);

}  // namespace lacuna::cuda
