// tests/simt/kernels/cuda/launch.cuh - stands in for src/kernels/cuda/launch.cuh.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "simt.h"

#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaFuncGetAttributes(attributes, ...) ((attributes)->binaryVersion = 90, cudaSuccess)
#define cudaDeviceGetAttribute(value, ...) (*(value) = 227 * 1024, cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, ...) (*(blocks) = 2, cudaSuccess)

namespace lacuna::cuda {

inline void check_cuda(cudaError_t) {}

struct LaunchShape {
  dim3 blocks;
  int threads = 0;
  int64_t shared = 0;
  int cluster = 1;
};
template <class... Args>
void launch_kernel(const Device&, Stream&, void (*kernel)(Args...), const LaunchShape& shape, Args... args) {
  simt::launch(shape.blocks, unsigned(shape.threads), shape.shared, [&] { kernel(args...); });
}

}  // namespace lacuna::cuda
