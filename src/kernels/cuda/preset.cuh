// src/kernels/cuda/preset.cuh - Preset, as the kernels do it (ops.h). For .cu files only.
#pragma once

#include "kernels/cuda/ops.h"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

/// All blocks of the grid together.
__device__ __forceinline__ void write_preset(const Preset& preset) {
  const int64_t block = blockIdx.x + int64_t(gridDim.x) * (blockIdx.y + int64_t(gridDim.y) * blockIdx.z);
  const int64_t blocks = int64_t(gridDim.x) * gridDim.y * gridDim.z;
  for (int64_t i = block * blockDim.x + threadIdx.x; i < preset.count / 4; i += blocks * blockDim.x) {
    const int64_t from = preset.period > 0 ? i % (preset.period / 4) : i;
    reinterpret_cast<float4*>(preset.data)[i] = preset.values != nullptr
                                                    ? __ldg(reinterpret_cast<const float4*>(preset.values) + from)
                                                    : make_float4(0, 0, 0, 0);
  }
}

}  // namespace lacuna::cuda
