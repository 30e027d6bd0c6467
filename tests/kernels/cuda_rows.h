// tests/kernels/cuda_rows.h - one launch of row-layout products, of the tests' device memory.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/rows.h"
#include "kernels/cuda_memory.h"

namespace lacuna::test {

/// x: [M, x_stride]; the results of each token are y_stride apart.
inline void launch_rows(std::span<const cuda::RowsPart> parts, const OnDevice<float>& x, int64_t M, int64_t x_stride,
                        int64_t y_stride, float threshold = 0) {
  cuda::RowsArgs args;
  args.parts = parts;
  args.x = x.data();
  args.threshold = threshold;
  args.M = M;
  args.x_stride = x_stride;
  args.y_stride = y_stride;
  cuda::launch_rows(device(), stream(), args);
}

}  // namespace lacuna::test
