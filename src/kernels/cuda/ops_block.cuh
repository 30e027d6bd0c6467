// src/kernels/cuda/ops_block.cuh - sums, lists and zeros of a block or a cluster of blocks. For .cu files only.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/preset.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

inline constexpr int kMostBlockWarps = 32, kMostCluster = 8;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// A cluster is one block before sm_90.
__device__ __forceinline__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
  return int(cooperative_groups::this_cluster().num_blocks());
#else
  return 1;
#endif
}
__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  return int(cooperative_groups::this_cluster().block_rank());
#else
  return 0;
#endif
}
// Blocks of a cluster write what they have to say into each other's shared memory, so that reading it costs nothing and
// no block has to wait for its readers at the end.
/// Early: says that this block runs. Before the first exchange: cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  if (cluster_size() > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  if (cluster_size() > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
/// slots[rank] of every block = value of thread 0 of the block `rank`. All threads call it, after a barrier of the
/// block.
template <class T>
__device__ __forceinline__ void exchange(T value, T slots[kMostCluster]) {
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x < cluster.num_blocks()) *cluster.map_shared_rank(slots + cluster_rank(), threadIdx.x) = value;
  cluster.sync();
#else
  if (threadIdx.x == 0) slots[0] = value;
  __syncthreads();
#endif
}

/// The sum over all threads of the cluster, the same in each of them. storage: of one sum, not used again.
struct SumStorage {
  float warp[kMostBlockWarps], block[kMostCluster];
};
__device__ __forceinline__ float cluster_sum(float v, SumStorage& storage) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  v = warp_sum(v);
  if (lane == 0) storage.warp[threadIdx.x / 32] = v;
  __syncthreads();
  v = warp_sum(lane < warps ? storage.warp[lane] : 0);
  if (cluster_size() == 1) return v;
  exchange(v, storage.block);
  v = 0;
#pragma unroll
  for (int rank = 0; rank < kMostCluster; ++rank)
    if (rank < cluster_size()) v += storage.block[rank];
  return v;
}

/// Which of a thread's four inputs are active, and how many of its warp's come before them.
struct Marks {
  int flags = 0, before = 0, of_warp = 0;
};
__device__ __forceinline__ Marks mark_active(const Collect& collect, const float v[4], int64_t k, int64_t end) {
  Marks marks;
  const unsigned lower = (1u << threadIdx.x % 32) - 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bool active = k + i < end;
    if (active) {
      const float size = collect.norms != nullptr ? fabsf(v[i]) * __ldg(collect.norms + k + i) : fabsf(v[i]);
      active = !(size < collect.threshold);
    }
    const unsigned who = __ballot_sync(~0u, active);
    marks.flags |= int(active) << i;
    marks.before += __popc(who & lower);
    marks.of_warp += __popc(who);
  }
  return marks;
}
__device__ __forceinline__ void write_active(const Collect& collect, const Marks& marks, int at, int64_t k) {
  at += marks.before;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (marks.flags >> i & 1) collect.list[at++] = int32_t(k + i);
}

/// Writes the list of a cluster whose blocks follow each other, each in rounds of four inputs a thread. first: of this
/// thread in round 0; rounds are `step` apart.
template <int kRounds>
struct ListStorage {
  int count[kRounds][kMostBlockWarps], block[kMostCluster];
};
template <int kRounds>
__device__ __forceinline__ void write_list(const Collect& collect, const Marks marks[kRounds], int64_t first,
                                           int64_t step, ListStorage<kRounds>& storage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (lane == 0)
    for (int r = 0; r < kRounds; ++r) storage.count[r][warp] = marks[r].of_warp;
  __syncthreads();
  // Each warp adds up by itself what comes before it.
  int at[kRounds], sum = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int n = lane < warps ? storage.count[r][lane] : 0;
    at[r] = sum + __reduce_add_sync(~0u, lane < warp ? n : 0);
    sum += __reduce_add_sync(~0u, n);
  }
  int base = 0, all = sum;
  if (cluster_size() > 1) {
    exchange(sum, storage.block);
    all = 0;
#pragma unroll
    for (int rank = 0; rank < kMostCluster; ++rank) {
      const int of_rank = rank < cluster_size() ? storage.block[rank] : 0;
      if (rank < cluster_rank()) base += of_rank;
      all += of_rank;
    }
  }
#pragma unroll
  for (int r = 0; r < kRounds; ++r) write_active(collect, marks[r], base + at[r], first + r * step);
  if (cluster_rank() == 0 && threadIdx.x == 0) *collect.count = all;
}

/// Floats [k, k + 4) of row; zeros from `end` on. aligned: row and k are, and 4 floats may be read where k + 4 <= end.
__device__ __forceinline__ void load4(const float* row, int64_t k, int64_t end, bool aligned, float v[4]) {
  if (aligned && k + 4 <= end) {
    const float4 whole = __ldcg(reinterpret_cast<const float4*>(row + k));
    v[0] = whole.x, v[1] = whole.y, v[2] = whole.z, v[3] = whole.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = k + i < end ? __ldcg(row + k + i) : 0.0f;
  }
}
__device__ __forceinline__ void store4(float* row, int64_t k, int64_t end, bool aligned, const float v[4]) {
  if (aligned && k + 4 <= end) {
    *reinterpret_cast<float4*>(row + k) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (k + i < end) row[k + i] = v[i];
  }
}

}  // namespace lacuna::cuda
