#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "kernels/cuda/beams.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kValues = 16;  // values of a thread
constexpr int64_t kOfBlock = int64_t{kThreads} * kValues, kMostValues = int64_t{1} << 24;

__global__ void __launch_bounds__(kThreads) order_beams(const BeamStep* step, uint32_t* sources, int64_t capacity) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, last = __ldcg(&step->position) - __ldcg(&step->first);
  if (i > last || i >= capacity) return;
  sources[i] = i == last ? 0x03020100u : __byte_perm(sources[i], 0, __ldcg(&step->parents));
}

/// The sum of e^(x - top) over some values, the largest of which is top.
struct PartialSum {
  float top, sum;
};
/// Workspace of a row: how many blocks have come, then their sums.
__device__ __forceinline__ unsigned* arrived_of(std::byte* row) { return reinterpret_cast<unsigned*>(row); }
__device__ __forceinline__ PartialSum* sums_of(std::byte* row) { return reinterpret_cast<PartialSum*>(row) + 1; }

// Grid: (ranges of kOfBlock values, rows). The block that comes last adds up those of its row in their order.
__global__ void __launch_bounds__(kThreads) log_sum_exp(const __grid_constant__ LogSumExpArgs a) {
  __shared__ float of_warp[kWarps];
  __shared__ bool is_last;
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int64_t m = blockIdx.y, first = blockIdx.x * kOfBlock + threadIdx.x;
  std::byte* const row = a.workspace + m * int64_t(sizeof(PartialSum)) * (gridDim.x + 1);
  float v[kValues], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int64_t n = first + int64_t{i} * kThreads;
    v[i] = n < a.N ? __ldcg(a.x + m * a.N + n) : -INFINITY;
    top = fmaxf(top, v[i]);
  }
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (lane == 0) of_warp[warp] = top;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, of_warp[w]);
  __syncthreads();
  const float shift = top == -INFINITY ? 0.0f : top;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += expf(v[i] - shift);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += of_warp[w];
    sums_of(row)[blockIdx.x] = {top, sum};
    __threadfence();
    is_last = atomicAdd(arrived_of(row), 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last || warp > 0) return;
  __threadfence();
  const float2* const sums = reinterpret_cast<const float2*>(sums_of(row));  // top, sum
  const int blocks = int(gridDim.x);
  float highest = -INFINITY;
  for (int b = lane; b < blocks; b += 32) highest = fmaxf(highest, __ldcg(sums + b).x);
  for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  double all = 0;
  for (int b = lane; b < blocks; b += 32) {
    const float2 part = __ldcg(sums + b);
    if (part.x != -INFINITY || part.y != 0) all += double(part.y) * exp(double(part.x) - double(highest));
  }
  for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
  if (lane > 0) return;
  a.out[m] = log(all) + double(highest);
  *arrived_of(row) = 0;
}

int64_t ranges(int64_t N) { return (N + kOfBlock - 1) / kOfBlock; }

}  // namespace

void launch_order_beams(const Device& device, Stream& stream, const BeamStep* step, uint32_t* sources,
                        int64_t capacity) {
  if (capacity <= 0) return;
  launch_kernel(device, stream, order_beams, {dim3(unsigned((capacity + kThreads - 1) / kThreads)), kThreads}, step,
                sources, capacity);
}

int64_t log_sum_exp_workspace_bytes(int64_t M, int64_t N) { return M * int64_t(sizeof(PartialSum)) * (ranges(N) + 1); }

void launch_log_sum_exp(const Device& device, Stream& stream, const LogSumExpArgs& args) {
  if (args.M <= 0) return;
  if (args.N < 1 || args.N > kMostValues)
    throw Error("the logarithm of a sum of {} exponentials; 1 to {} run on a device", args.N, kMostValues);
  launch_kernel(device, stream, log_sum_exp, {dim3(unsigned(ranges(args.N)), unsigned(args.M)), kThreads}, args);
}

}  // namespace lacuna::cuda
