// src/kernels/cuda/launch.cuh - launches that may overlap the end of the kernel before. For .cu files only.
#pragma once

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"

namespace lacuna::cuda {

/// kernel must call wait_for_predecessors() before it reads what earlier kernels wrote, and before it writes.
template <class... Args>
void launch_overlapping(const Device& device, Stream& stream, void (*kernel)(Args...), dim3 blocks, unsigned threads,
                        Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream.handle();
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = device.info().major >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace lacuna::cuda
