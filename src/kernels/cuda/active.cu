#include <cub/block/block_scan.cuh>

#include "kernels/cuda/active.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 1024, kItems = 4;  // inputs of a thread in one round

/// Rounds of kThreads * kItems inputs. Each thread counts those of its own inputs that are active; the sums of the
/// counts before it say where it writes.
__global__ void __launch_bounds__(kThreads)
    collect(const float* x, int K, const float* norms, float t, int32_t* list, int32_t* count) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  launch_dependents();
  wait_for_predecessors();
  int written = 0;
  for (int k0 = 0; k0 < K; k0 += kThreads * kItems) {
    const int first = k0 + int(threadIdx.x) * kItems;
    bool active[kItems];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int k = first + i;
      float size = k < K ? fabsf(__ldcg(x + k)) : 0.0f;
      if (norms != nullptr && k < K) size *= __ldg(norms + k);
      active[i] = k < K && !(size < t);
      mine += int(active[i]);
    }
    int before, all;
    Scan(storage).ExclusiveSum(mine, before, all);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (active[i]) list[written + before++] = first + i;
    written += all;
    __syncthreads();  // the storage is used again
  }
  if (threadIdx.x == 0) *count = written;
}

}  // namespace

void collect_active(const Device& device, Stream& stream, const float* x, int64_t K, const float* norms, float t,
                    int32_t* list, int32_t* count) {
  launch_kernel(device, stream, collect, {dim3(1), kThreads}, x, int(K), norms, t, list, count);
}

}  // namespace lacuna::cuda
