// src/kernels/cuda/baselines.h - what SpQt compares its sparse GEMV with (sections 4.2 and 6.1), as kernels: correct
// products that leave inactive inputs out, without what makes leaving them out worth while. For benchmarks. Plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv.h"

namespace lacuna::cuda {

/// All pointers are of device memory.
struct SkippingRowsArgs {
  const std::byte* weights = nullptr;  // q4_K as layout/q4_K.h has it, [N, K], K a multiple of 256; aligned to 16 bytes
  int64_t N = 0, K = 0;
  const float* x = nullptr;  // [K], aligned to 16 bytes
  float threshold = 0;       // inputs with |x| < threshold are left out
  float* y = nullptr;        // [N]
};

/// B1, "naive sparse": a warp has four rows, as the paper says of llama.cpp's kernel, and branches at each weight.
void launch_skipping_rows(const Device& device, Stream& stream, const SkippingRowsArgs& args);

/// B2, "ours sparse (no load balancing)": the zigzag kernel, whose warps have fixed, equal ranges of the columns and
/// skip the inactive ones of each 32 as they come to them. zz4_k; args.inputs is not read. Throws Error for a gate,
/// norms or a workspace.
void launch_unbalanced(const Device& device, Stream& stream, int segments, const GemvArgs& args);

/// "A purely column-parallel strategy": each warp has a few columns of a list of the active ones, and all add to y by
/// atomics. zz4_k; args.inputs is not read. Throws Error for a gate, norms or a workspace.
void launch_column_parallel(const Device& device, Stream& stream, const GemvArgs& args);

}  // namespace lacuna::cuda
