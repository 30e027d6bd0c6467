#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/ops_block.cuh"

namespace lacuna::cuda {
namespace {

// Rows are shared out over a cluster's blocks in ranges of a multiple of four; a block takes its range in rounds.
constexpr int kMostThreads = 1024;

struct RowRange {
  int64_t first, end, step;  // of this thread: first + round * step
};
__device__ __forceinline__ RowRange row_range(int64_t K) {
  const int64_t span = (K + 4 * cluster_size() - 1) / (4 * cluster_size()) * 4, begin = cluster_rank() * span;
  return {begin + threadIdx.x * 4, min(K, begin + span), int64_t(blockDim.x) * 4};
}

/// Four values of the sum of `parts` arrays, `stride` apart.
__device__ __forceinline__ void load4_sum(const float* from, int parts, int64_t stride, int64_t k, int64_t end,
                                          bool aligned, float v[4]) {
  load4(from, k, end, aligned, v);
  for (int part = 1; part < parts; ++part) {
    float more[4];
    load4(from + part * stride, k, end, aligned, more);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += more[i];
  }
}

// ---- Norms ----

template <int kRounds>
__global__ void __launch_bounds__(kMostThreads) norm_rows(const __grid_constant__ NormArgs a) {
  __shared__ SumStorage sums[2];
  __shared__ ListStorage<kRounds> list;
  launch_dependents();
  cluster_arrive();
  const int64_t m = blockIdx.y;
  float* const x = a.x + m * a.K;
  const bool aligned = a.K % 4 == 0;
  const RowRange range = row_range(a.K);
  float v[kRounds][4], weight[kRounds][4];
#pragma unroll
  for (int r = 0; r < kRounds; ++r)  // weights do not depend on earlier kernels
    if (a.weight != nullptr) load4(a.weight, range.first + r * range.step, range.end, aligned, weight[r]);
  wait_for_predecessors();
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int64_t k = range.first + r * range.step;
    load4(x, k, range.end, aligned, v[r]);
    if (a.add == nullptr) continue;
    float more[4];
    load4_sum(a.add + m * (a.add_row > 0 ? a.add_row : a.K), a.parts, a.add_stride, k, range.end, aligned, more);
    for (int i = 0; i < 4; ++i) v[r][i] += more[i];
    store4(x, k, range.end, aligned, v[r]);
  }
  write_preset(a.preset);
  cluster_wait();
  if (a.weight != nullptr) {
    float mean = 0;
    if (a.bias != nullptr) {
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) sum += (v[r][0] + v[r][1]) + (v[r][2] + v[r][3]);
      mean = cluster_sum(sum, sums[1]) / float(a.K);
    }
    float squares = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (range.first + r * range.step + i < range.end) v[r][i] -= mean;
        squares = fmaf(v[r][i], v[r][i], squares);
      }
    const float inverse = 1 / sqrtf(cluster_sum(squares, sums[0]) / float(a.K) + a.eps);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t k = range.first + r * range.step;
      float bias[4] = {};
      if (a.bias != nullptr) load4(a.bias, k, range.end, aligned, bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[r][i] = v[r][i] * inverse * weight[r][i] + bias[i];
      store4(a.y + m * a.K, k, range.end, aligned, v[r]);
    }
  }
  if (a.collect.list != nullptr) {
    Marks marks[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t k = range.first + r * range.step;
      marks[r] = mark_active(a.collect, v[r], k, range.end);
    }
    write_list<kRounds>(a.collect, marks, range.first, range.step, list);
  }
}

// ---- Gates ----

template <int kRounds>
__global__ void __launch_bounds__(kMostThreads) gate_values(const __grid_constant__ GateArgs a) {
  __shared__ ListStorage<kRounds> list;
  launch_dependents();
  cluster_arrive();
  wait_for_predecessors();
  const RowRange range = row_range(a.count);
  float v[kRounds][4], up[kRounds][4];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int64_t k = range.first + r * range.step;
    load4(a.x, k, range.end, true, v[r]);
    if (a.gate == Gate::swiglu) load4(a.up, k, range.end, true, up[r]);
  }
  Marks marks[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int64_t k = range.first + r * range.step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (a.gate == Gate::swiglu) v[r][i] = silu(v[r][i]) * up[r][i];
      if (a.gate == Gate::relu) v[r][i] = v[r][i] < 0 ? 0.0f : v[r][i];
    }
    if (a.gate != Gate::none) store4(a.out, k, range.end, true, v[r]);
    marks[r] = mark_active(a.collect, v[r], k, range.end);
  }
  write_preset(a.preset);
  cluster_wait();
  write_list<kRounds>(a.collect, marks, range.first, range.step, list);
}

__global__ void __launch_bounds__(256) gate_many(const __grid_constant__ GateArgs a) {
  launch_dependents();
  wait_for_predecessors();
  for (int64_t k = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * 4; k < a.count;
       k += int64_t(gridDim.x) * blockDim.x * 4) {
    float v[4], up[4] = {};
    load4(a.x, k, a.count, true, v);
    if (a.gate == Gate::swiglu) load4(a.up, k, a.count, true, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (a.gate == Gate::swiglu) v[i] = silu(v[i]) * up[i];
      if (a.gate == Gate::relu) v[i] = v[i] < 0 ? 0.0f : v[i];
    }
    store4(a.out, k, a.count, true, v);
  }
  write_preset(a.preset);
}

__global__ void __launch_bounds__(256) add_values(const float* y, int64_t count, float* x, int parts, int64_t stride) {
  launch_dependents();
  wait_for_predecessors();
  for (int64_t k = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * 4; k < count;
       k += int64_t(gridDim.x) * blockDim.x * 4) {
    float v[4], more[4];
    load4(x, k, count, true, v);
    load4_sum(y, parts, stride, k, count, true, more);
    for (int i = 0; i < 4; ++i) v[i] += more[i];
    store4(x, k, count, true, v);
  }
}

/// Blocks, threads and rounds of a kernel that takes rows of K values, M of them.
struct RowsOfBlocks {
  int cluster, threads, rounds;
};
RowsOfBlocks share_row(const Device& device, int64_t M, int64_t K, const char* what) {
  // One row is shared by eight blocks: the loads of a block's share are then one round trip.
  const int cluster = device.info().major >= 9 && M == 1 && K > 2048 ? kMostCluster : 1;
  const int64_t of_block = (K + 4 * cluster - 1) / (4 * cluster);  // groups of four
  const int threads = int(std::clamp<int64_t>((of_block + 31) / 32 * 32, 64, cluster > 1 ? 512 : kMostThreads));
  int rounds = 1;
  while (rounds * threads < of_block) rounds *= 2;
  if (rounds > 8) throw Error("--device cuda: {} of {} values; the kernels take at most {}", what, K, kMostCollected);
  return {cluster, threads, rounds};
}
#define LACUNA_WITH_ROUNDS(kernel, share, blocks, args)                   \
  do {                                                                    \
    const LaunchShape shape{blocks, (share).threads, 0, (share).cluster}; \
    if ((share).rounds == 1)                                              \
      launch_kernel(device, stream, kernel<1>, shape, args);              \
    else if ((share).rounds == 2)                                         \
      launch_kernel(device, stream, kernel<2>, shape, args);              \
    else if ((share).rounds == 4)                                         \
      launch_kernel(device, stream, kernel<4>, shape, args);              \
    else                                                                  \
      launch_kernel(device, stream, kernel<8>, shape, args);              \
  } while (false)

unsigned blocks_for(const Device& device, int64_t count) {
  return unsigned(std::clamp<int64_t>((count + 1023) / 1024, 1, device.info().multiprocessors * 8));
}

// ---- Argmax ----

constexpr int kArgmaxThreads = 256;
struct ArgmaxState {
  unsigned long long best;
  unsigned arrived, unused;
};

__global__ void __launch_bounds__(kArgmaxThreads) argmax(const __grid_constant__ ArgmaxArgs a) {
  __shared__ unsigned long long of_warp[kArgmaxThreads / 32];
  launch_dependents();
  wait_for_predecessors();
  const float* const x = a.x + blockIdx.y * a.N;
  unsigned long long best = 0;
  const bool aligned = a.N % 4 == 0;
#pragma unroll 2
  for (int64_t k = (blockIdx.x * int64_t(kArgmaxThreads) + threadIdx.x) * 4; k < a.N;
       k += int64_t(gridDim.x) * kArgmaxThreads * 4) {
    float v[4];
    load4(x, k, a.N, aligned, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (k + i >= a.N) continue;
      const unsigned bits = __float_as_uint(v[i] + 0.0f);  // -0 is 0
      const unsigned order = v[i] != v[i] ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
      best = max(best, static_cast<unsigned long long>(order) << 32 | (0xffffffffu - unsigned(k + i)));
    }
  }
  for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const unsigned long long of : of_warp) best = max(best, of);
  ArgmaxState& state = reinterpret_cast<ArgmaxState*>(a.workspace)[blockIdx.y];
  atomicMax(&state.best, best);
  __threadfence();
  if (atomicAdd(&state.arrived, 1u) + 1 < gridDim.x) return;
  __threadfence();
  a.ids[blockIdx.y] = int32_t(0xffffffffu - unsigned(atomicExch(&state.best, 0ull)));
  state.arrived = 0;
  if (a.position != nullptr && blockIdx.y == 0) *a.position += 1;
}

__global__ void __launch_bounds__(256)
    count_inactive(const float* x, int64_t K, const float* norms, float t, unsigned long long* count) {
  wait_for_predecessors();
  launch_dependents();
  int mine = 0;
  for (int64_t k = blockIdx.x * int64_t{256} + threadIdx.x; k < K; k += gridDim.x * int64_t{256}) {
    float size = fabsf(__ldcg(x + k));
    if (norms != nullptr) size *= __ldg(norms + k);
    mine += int(size < t);
  }
  mine = __reduce_add_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0 && mine > 0) atomicAdd(count, static_cast<unsigned long long>(mine));
}

}  // namespace

void launch_norm(const Device& device, Stream& stream, const NormArgs& args) {
  if (args.M <= 0) return;
  if (args.collect.list != nullptr && args.M != 1)
    throw Error("a list of active inputs is of one token, not {}", args.M);
  const RowsOfBlocks share = share_row(device, args.M, args.K, "a norm");
  LACUNA_WITH_ROUNDS(norm_rows, share, dim3(unsigned(share.cluster), unsigned(args.M)), args);
}

void launch_gate(const Device& device, Stream& stream, const GateArgs& args) {
  if (args.collect.list == nullptr) {
    launch_kernel(device, stream, gate_many, {dim3(blocks_for(device, args.count)), 256}, args);
    return;
  }
  const RowsOfBlocks share = share_row(device, 1, args.count, "a list");
  LACUNA_WITH_ROUNDS(gate_values, share, dim3(unsigned(share.cluster)), args);
}

void launch_add(const Device& device, Stream& stream, const float* y, int64_t count, float* x, int parts,
                int64_t stride) {
  launch_kernel(device, stream, add_values, {dim3(blocks_for(device, count)), 256}, y, count, x, parts, stride);
}

int64_t argmax_workspace_bytes(int64_t M) { return M * int64_t(sizeof(ArgmaxState)); }

void launch_argmax(const Device& device, Stream& stream, const ArgmaxArgs& args) {
  if (args.M <= 0) return;
  const int64_t blocks =
      std::clamp<int64_t>((args.N + 8 * kArgmaxThreads - 1) / (8 * kArgmaxThreads), 1, device.info().multiprocessors);
  launch_kernel(device, stream, argmax, {dim3(unsigned(blocks), unsigned(args.M)), kArgmaxThreads}, args);
}

void launch_count_inactive(const Device& device, Stream& stream, const float* x, int64_t K, const float* norms, float t,
                           unsigned long long* count) {
  launch_kernel(device, stream, count_inactive, {dim3(blocks_for(device, K)), 256}, x, K, norms, t, count);
}

}  // namespace lacuna::cuda
