#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

using Key = unsigned long long;  // larger: a larger value, or the smaller id of equal ones

constexpr int kSlice = 2048, kThreads = kSlice / 2;  // values that a block sorts
constexpr int kListsOfLane = 16;                     // that the merging warp takes

__device__ __forceinline__ Key key_of(float v, int64_t id) {
  const unsigned bits = __float_as_uint(v + 0.0f);  // -0 is 0
  const unsigned order = v != v ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(order) << 32 | (0xffffffffu - unsigned(id));
}
__device__ __forceinline__ TopKCandidate candidate_of(Key key) {
  const auto order = unsigned(key >> 32);
  return {__uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order), int32_t(0xffffffffu - unsigned(key))};
}

/// Row m's workspace: bad, then the k largest keys of each slice, descending.
__device__ __forceinline__ Key* workspace_of(const TopKArgs& a, int64_t m, int64_t lists) {
  return reinterpret_cast<Key*>(a.workspace) + m * (1 + lists * a.k);
}

// Grid: (slices, rows).
__global__ void __launch_bounds__(kThreads) sort_slices(const __grid_constant__ TopKArgs a) {
  __shared__ float values[kSlice];
  __shared__ Key keys[kSlice];
  launch_dependents();
  wait_for_predecessors();
  const int64_t first = blockIdx.x * int64_t(kSlice);
  Key* const workspace = workspace_of(a, blockIdx.y, gridDim.x);
  const float* const x = a.x + blockIdx.y * a.N;
  for (int i = int(threadIdx.x); i < kSlice; i += kThreads) {
    const int64_t id = first + i;
    const float v = id < a.N ? __ldcg(x + id) : -INFINITY;
    if (!(v < INFINITY)) atomicMin(reinterpret_cast<int*>(workspace), int(id));
    values[i] = v;
  }
  __syncthreads();
  for (int64_t r = threadIdx.x; r < a.n_penalized; r += kThreads) {
    const int64_t i = __ldg(a.penalized + r) - first;
    if (i >= 0 && i < kSlice) values[i] = values[i] > 0 ? values[i] / a.penalty : values[i] * a.penalty;
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kSlice; i += kThreads)
    keys[i] = first + i < a.N ? key_of(values[i], first + i) : 0;
  // Bitonic, descending.
  for (int size = 2; size <= kSlice; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int at = 2 * int(threadIdx.x) - (int(threadIdx.x) & (stride - 1)), to = at + stride;
      const Key low = keys[at], high = keys[to];
      const bool descending = (at & size) == 0;
      if ((low < high) == descending) keys[at] = high, keys[to] = low;
    }
  __syncthreads();
  Key* const out = workspace + 1 + blockIdx.x * int64_t(a.k);
  for (int i = int(threadIdx.x); i < a.k; i += kThreads) out[i] = keys[i];
}

/// One warp a row: each lane has the heads of up to kListsOfLane lists; the largest of all leaves its list k times.
__global__ void __launch_bounds__(32) merge_slices(const __grid_constant__ TopKArgs a, int lists) {
  launch_dependents();
  wait_for_predecessors();
  Key* const workspace = workspace_of(a, blockIdx.x, lists);
  const Key* const all = workspace + 1;
  TopKCandidate* const out = a.out + blockIdx.x * int64_t(a.k + 1);
  Key head[kListsOfLane], next[kListsOfLane];
  int taken[kListsOfLane];
#pragma unroll
  for (int l = 0; l < kListsOfLane; ++l) {
    const int list = l * 32 + int(threadIdx.x);
    const Key* const from = all + int64_t(list) * a.k;
    head[l] = list < lists ? __ldcg(from) : 0;
    next[l] = list < lists && a.k > 1 ? __ldcg(from + 1) : 0;
    taken[l] = 0;
  }
  for (int i = 0; i < a.k; ++i) {
    Key best = 0;
#pragma unroll
    for (int l = 0; l < kListsOfLane; ++l) best = max(best, head[l]);
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
#pragma unroll
    for (int l = 0; l < kListsOfLane; ++l) {
      if (best == 0 || head[l] != best) continue;
      head[l] = next[l];
      taken[l] += 1;
      next[l] = taken[l] + 1 < a.k ? __ldcg(all + int64_t(l * 32 + int(threadIdx.x)) * a.k + taken[l] + 1) : 0;
    }
    if (threadIdx.x == 0) out[i] = candidate_of(best);
  }
  if (threadIdx.x > 0) return;
  int& bad = *reinterpret_cast<int*>(workspace);
  out[a.k] = {0, bad == kNoBadValue ? -1 : bad};
  bad = kNoBadValue;
}

int64_t slices(int64_t N) { return (N + kSlice - 1) / kSlice; }

}  // namespace

int64_t top_k_workspace_bytes(int64_t N, int64_t k) { return int64_t(sizeof(Key)) * (1 + slices(N) * k); }

void launch_top_k(const Device& device, Stream& stream, const TopKArgs& args) {
  if (args.M <= 0) return;
  const int64_t lists = slices(args.N);
  if (args.k < 1 || args.k > std::min<int64_t>(args.N, kSlice) || lists > int64_t{32} * kListsOfLane)
    throw Error("the largest {} of {} values: 1 to {} of at most {} are found on a device", args.k, args.N, kSlice,
                int64_t{32} * kListsOfLane * kSlice);
  launch_kernel(device, stream, sort_slices, {dim3(unsigned(lists), unsigned(args.M)), kThreads}, args);
  launch_kernel(device, stream, merge_slices, {dim3(unsigned(args.M)), 32}, args, int(lists));
}

}  // namespace lacuna::cuda
