// src/kernels/cuda/check.h - errors of the CUDA runtime. For .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <source_location>

namespace lacuna::cuda {

/// Throws Error with CUDA's own words and the place of the call.
void check_cuda(cudaError_t status, std::source_location where = std::source_location::current());

}  // namespace lacuna::cuda
