// src/kernels/cuda/gemm_columns.cu - launches that write operands of zigzag columns.
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/gemm_columns.cuh"
#include "kernels/cuda/prepared.h"

namespace lacuna::cuda {
namespace {

const GemmColumnsKernel& kernel_of(const layout::Layout& layout) {
  if (const GemmColumnsKernel* kernel = gemm_columns_kernel(layout.id)) return *kernel;
  column_form(layout);  // throws, naming those that there are
  throw Error("--device cuda: no kernel of several tokens reads {}", layout.name);
}

void launch(const Device& device, Stream& stream, const GemmColumnsKernel& kernel, bool largest, const Columns& weights,
            int64_t first_row, int64_t rows, float* scale, std::byte* tiles) {
  if (rows <= 0) return;
  const int64_t skipped = first_row * weights.K;
  GemmColumns p{};
  p.codes = weights.codes + skipped * kernel.code_bytes;
  p.headers = weights.headers + skipped * kernel.header_bytes;
  p.scale = scale;
  p.tiles = tiles;
  p.K = int(weights.K);
  p.tiles_of_row = int(tiles_of_row(weights.K));
  // Blocks that fill the device a few times over: each begins with a wait for its first columns.
  constexpr int64_t kBlocks = 16;  // a multiprocessor
  const int64_t all = p.tiles_of_row * rows;
  p.tiles_of_block = int(std::clamp<int64_t>(all / (kBlocks * device.info().multiprocessors), 1, p.tiles_of_row));
  const int64_t blocks = (p.tiles_of_row + p.tiles_of_block - 1) / p.tiles_of_block;
  launch_kernel(device, stream, largest ? kernel.largest : kernel.write, {dim3(unsigned(blocks), unsigned(rows)), 256},
                p);
}

__global__ void __launch_bounds__(256) finish_scales(float* scale) {
  launch_dependents();
  wait_for_predecessors();
  float* const own = scale + int64_t(blockIdx.x) * 256 + threadIdx.x;
  *own = scale_of(__float_as_uint(*own));
}

}  // namespace

void launch_weight_scales(const Device& device, Stream& stream, const layout::Layout& layout, const Columns& weights,
                          float* scale) {
  if (weights.rows <= 0) return;
  check_cuda(cudaMemsetAsync(scale, 0, size_t(weights.rows) * 256 * sizeof(float), stream.handle()));
  launch(device, stream, kernel_of(layout), true, weights, 0, weights.rows, scale, nullptr);
  launch_kernel(device, stream, finish_scales, {dim3(unsigned(weights.rows)), 256}, scale);
}

void launch_gemm_weights(const Device& device, Stream& stream, const layout::Layout& layout, const Columns& weights,
                         int64_t first, const Operand& to) {
  if (first % 256 != 0) throw Error("outputs of columns come 256 at a time; output {} begins none", first);
  launch(device, stream, kernel_of(layout), false, weights, first / 256, (to.rows + 255) / 256, to.scale, to.tiles);
}

}  // namespace lacuna::cuda
