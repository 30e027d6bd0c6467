// src/kernels/cuda/launch.cuh - launches that may overlap the end of the kernel before, with shared memory and
// clusters. For .cu files only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"

namespace lacuna::cuda {

struct LaunchShape {
  dim3 blocks;
  int threads = 0;
  int64_t shared = 0;  // bytes
  int cluster = 1;     // blocks along x that can read each other's shared memory; more than 1 from sm_90 on
};

/// kernel must call wait_for_predecessors() before it reads what earlier kernels wrote, and before it writes,
/// unless what it waits for has said that it may (GemvArgs::is_sibling).
template <class... Args>
void launch_kernel(const Device& device, Stream& stream, void (*kernel)(Args...), const LaunchShape& shape,
                   Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.shared);
  config.stream = stream.handle();
  cudaLaunchAttribute attributes[2] = {};
  if (device.info().major >= 9) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(shape.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace lacuna::cuda
