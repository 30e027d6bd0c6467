// src/kernels/cuda/calibration.cu - the kernels of calibration.h; all memory bound but the counts, which are bound by
// atomics in the cache.
#include <algorithm>

#include "kernels/cuda/calibration.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/preset.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256, kMostRowBlocks = 1024;

/// A block takes kThreads columns of every gridDim.y-th row.
LaunchShape rows_shape(int64_t M, int64_t K) {
  return {dim3(unsigned((K + kThreads - 1) / kThreads), unsigned(std::min<int64_t>(M, kMostRowBlocks))), kThreads};
}
__device__ __forceinline__ int64_t own_column() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }

__global__ void __launch_bounds__(kThreads) gate_rows(const __grid_constant__ GateRowsArgs a) {
  launch_dependents();
  wait_for_predecessors();
  write_preset(a.preset);
  const int64_t k = own_column();
  if (k >= a.K) return;
  for (int64_t m = blockIdx.y; m < a.M; m += gridDim.y) {
    const float x = __ldcg(a.x + m * a.stride + k);
    a.y[m * a.K + k] = a.gate == Gate::swiglu ? silu(x) * __ldcg(a.up + m * a.stride + k) : x < 0 ? 0.0f : x;
  }
}

__device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

__global__ void __launch_bounds__(kThreads) count_sizes(const __grid_constant__ CountSizesArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t k = own_column();
  if (k >= a.K) return;
  const float norm = a.norms != nullptr ? __ldg(a.norms + k) : 1.0f;
  for (int64_t m = blockIdx.y; m < a.M; m += gridDim.y)
    atomicAdd(a.bins + (magnitude_bits(__ldcg(a.x + m * a.K + k) * norm) >> kSizeShift), 1u);
}

__global__ void __launch_bounds__(kThreads) find_non_finite(const float* x, int64_t count, uint32_t* first) {
  launch_dependents();
  wait_for_predecessors();
  for (int64_t i = own_column(); i < count; i += int64_t(gridDim.x) * kThreads)
    if (magnitude_bits(__ldcg(x + i)) >= 0x7f800000u) {
      atomicMin(first, uint32_t(i));
      return;  // the thread's further ones lie behind
    }
}

__global__ void __launch_bounds__(kThreads) mask_rows(const __grid_constant__ MaskRowsArgs a) {
  __shared__ unsigned of_warp[kThreads / 32];
  launch_dependents();
  wait_for_predecessors();
  const int64_t k = own_column();
  const float norm = a.norms != nullptr && k < a.K ? __ldg(a.norms + k) : 1.0f;
  unsigned left_out = 0;
  for (int64_t m = blockIdx.y; k < a.K && m < a.M; m += gridDim.y) {
    const float x = __ldcg(a.x + m * a.K + k);
    const bool inactive = (a.first + m) % a.window >= a.dense && fabsf(x) * norm < a.t;
    a.y[m * a.K + k] = inactive ? 0.0f : x;
    left_out += unsigned(inactive);
  }
  if (a.inactive == nullptr) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) left_out += __shfl_xor_sync(~0u, left_out, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = left_out;
  __syncthreads();
  if (threadIdx.x > 0) return;
  unsigned long long all = 0;
  for (const unsigned of : of_warp) all += of;
  if (all > 0) atomicAdd(a.inactive, all);
}

__global__ void __launch_bounds__(kThreads)
    squared_distance(const float* a, const float* b, int64_t count, double* parts) {
  __shared__ double of_warp[kThreads / 32];
  launch_dependents();
  wait_for_predecessors();
  double sum = 0;
  for (int64_t i = own_column(); i < count; i += int64_t(gridDim.x) * kThreads) {
    const double d = double(__ldcg(a + i)) - double(__ldcg(b + i));
    sum += d * d;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  double all = 0;
  for (const double of : of_warp) all += of;
  parts[blockIdx.x] = all;
}

}  // namespace

void launch_gate_rows(const Device& device, Stream& stream, const GateRowsArgs& args) {
  if (args.M <= 0 || args.K <= 0) return;
  launch_kernel(device, stream, gate_rows, rows_shape(args.M, args.K), args);
}

void launch_count_sizes(const Device& device, Stream& stream, const CountSizesArgs& args) {
  if (args.M <= 0 || args.K <= 0) return;
  launch_kernel(device, stream, count_sizes, rows_shape(args.M, args.K), args);
}

void launch_find_non_finite(const Device& device, Stream& stream, const float* x, int64_t count, uint32_t* first) {
  if (count <= 0) return;
  const int64_t blocks =
      std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, int64_t{device.info().multiprocessors} * 8);
  launch_kernel(device, stream, find_non_finite, {dim3(unsigned(blocks)), kThreads}, x, count, first);
}

void launch_mask_rows(const Device& device, Stream& stream, const MaskRowsArgs& args) {
  if (args.M <= 0 || args.K <= 0) return;
  launch_kernel(device, stream, mask_rows, rows_shape(args.M, args.K), args);
}

void launch_squared_distance(const Device& device, Stream& stream, const float* a, const float* b, int64_t count,
                             double* parts) {
  launch_kernel(device, stream, squared_distance, {dim3(kDistanceParts), kThreads}, a, b, count, parts);
}

}  // namespace lacuna::cuda
