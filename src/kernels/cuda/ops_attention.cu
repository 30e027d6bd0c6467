// One-token attention. A block has the query heads of one key head and a range of positions; a position belongs to
// kLanes lanes, 8 elements of a head each. Ranges are added up by the block that is done last, in a fixed order.
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/ops_block.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kWarps = 8, kMostHeadDim = 256, kMostHeads = kWarps, kMostRanges = 128;
constexpr int kWholeRange = 128, kLeastRange = 64;  // positions: up to the first one block has them all
/// Blocks that a multiprocessor holds, as the registers allow.
constexpr int resident_blocks(int heads) { return heads < 8 ? 2 : 1; }

/// One head in a warp's registers: element lane + 32 i.
struct HeadValues {
  float v[kMostHeadDim / 32];
};
__device__ __forceinline__ HeadValues load_head(const float* from, int D) {
  HeadValues head;
#pragma unroll
  for (int i = 0; i < kMostHeadDim / 32; ++i) {
    const int d = threadIdx.x % 32 + 32 * i;
    head.v[i] = d < D ? __ldcg(from + d) : 0.0f;
  }
  return head;
}
/// Norm and rotary embedding for position `at` by one warp; to: [head_dim] of shared memory.
__device__ __forceinline__ void make_head(const Heads& h, const HeadValues& head, const float* norm, int64_t at,
                                          float* to) {
  const int lane = threadIdx.x % 32, D = int(h.head_dim);
  float inverse = 1;
  if (norm != nullptr) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kMostHeadDim / 32; ++i) squares = fmaf(head.v[i], head.v[i], squares);
    inverse = 1 / sqrtf(warp_sum(squares) / float(D) + h.norm_eps);
  }
#pragma unroll
  for (int i = 0; i < kMostHeadDim / 32; ++i) {
    const int d = lane + 32 * i;
    if (d < D) to[d] = norm != nullptr ? head.v[i] * inverse * __ldg(norm + d) : head.v[i];
  }
  __syncwarp();
  if (h.cos != nullptr) {
    const int half = int(h.n_rot) / 2;
#pragma unroll
    for (int j = 0; j < kMostHeadDim / 64; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) break;
      const float c = __ldg(h.cos + at * half + i), s = __ldg(h.sin + at * half + i);
      const int a = h.adjacent ? 2 * i : i, b = h.adjacent ? 2 * i + 1 : i + half;
      const float x = to[a], y = to[b];
      to[a] = x * c - y * s;
      to[b] = x * s + y * c;
    }
  }
  __syncwarp();
}

/// Where a head's keys and values of a position are.
struct CachePlace {
  __half *keys, *values;
};
__device__ __forceinline__ CachePlace cache_place(const Heads& h, int64_t kv_head, int64_t at) {
  const int64_t place = (kv_head * h.cache.capacity + at) * h.head_dim;
  return {reinterpret_cast<__half*>(h.cache.keys) + place, reinterpret_cast<__half*>(h.cache.values) + place};
}
/// Of a beam's slot; at: from the first position that beams have apart.
__device__ __forceinline__ CachePlace beam_place(const Heads& h, int64_t slot, int64_t kv_head, int64_t at) {
  const int64_t place = ((slot * h.n_kv_heads + kv_head) * h.beams.capacity + at) * h.head_dim;
  return {reinterpret_cast<__half*>(h.beams.keys) + place, reinterpret_cast<__half*>(h.beams.values) + place};
}

/// Stores a head's keys and values of position `at`, by one warp. scratch: [head_dim] of shared memory.
__device__ __forceinline__ void store_head(const Heads& h, const HeadValues& k, const HeadValues& v, int64_t at,
                                           CachePlace to, float* scratch) {
  const int D = int(h.head_dim);
  make_head(h, k, h.k_norm, at, scratch);
#pragma unroll
  for (int i = 0; i < kMostHeadDim / 32; ++i) {
    const int d = threadIdx.x % 32 + 32 * i;
    if (d >= D) break;
    to.keys[d] = __float2half_rn(scratch[d]);
    to.values[d] = __float2half_rn(v.v[i]);
  }
}

// Grid: (heads and key heads, four a block; M).
__global__ void __launch_bounds__(128) prepare_heads(const __grid_constant__ Heads h) {
  __shared__ float scratch[4][kMostHeadDim];
  launch_dependents();
  wait_for_predecessors();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t head = int64_t(blockIdx.x) * 4 + warp, m = blockIdx.y, at = __ldcg(h.position) + m;
  if (head < h.n_heads) {
    float* const q = h.q + m * h.q_stride + head * h.head_dim;
    make_head(h, load_head(q, int(h.head_dim)), h.q_norm, at, scratch[warp]);
    for (int d = lane; d < h.head_dim; d += 32) q[d] = scratch[warp][d];
  } else if (head < h.n_heads + h.n_kv_heads) {
    const int64_t kv_head = head - h.n_heads, from = m * h.kv_stride + kv_head * h.head_dim;
    store_head(h, load_head(h.k + from, int(h.head_dim)), load_head(h.v + from, int(h.head_dim)), at,
               cache_place(h, kv_head, at), scratch[warp]);
  }
}

struct AttentionParams {
  AttentionArgs a;
  int ranges, passes;  // most ranges of positions; blocks of query heads of one key head
  float* partial;      // [M, n_heads, ranges, head_dim + 2]: sums, then the maximum and the total
  unsigned* arrived;   // [M, n_kv_heads * passes]
};

__device__ __forceinline__ void unpack(uint4 v, float out[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(as_half2(words[i]));
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ uint4 load_cached(const __half* from) {
  return __ldcg(reinterpret_cast<const uint4*>(from));
}

/// 2^(a - b) where b is the larger or both are -infinity.
__device__ __forceinline__ float shrink(float a, float b) { return b == -INFINITY ? 0.0f : exp2f(a - b); }

/// Whether this block is the last of `of` to come here. All of the block's writes can then be read by that one.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, unsigned of) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) + 1 == of;
    if (last) *counter = 0;
  }
  __syncthreads();
  const bool answer = last;
  if (answer) __threadfence();
  __syncthreads();
  return answer;
}

/// kBeams: tokens are of beams (BeamCache).
template <int kLanes, int kHeads, bool kBeams>
__global__ void __launch_bounds__(kWarps * 32, resident_blocks(kHeads))
    attend(const __grid_constant__ AttentionParams p) {
  constexpr int kPositions = 32 / kLanes;      // of a warp at a time
  constexpr int kBatch = kHeads >= 4 ? 2 : 4;  // such in flight
  __shared__ __align__(16) float heads[kHeads][kMostHeadDim];
  __shared__ float scratch[kMostHeadDim];
  __shared__ float maxima[kWarps][kHeads], totals[kWarps][kHeads];
  float* const sums = dynamic_shared<float>();  // [kWarps][kHeads][head_dim]
  __shared__ float range_maxima[kHeads * kMostRanges], range_totals[kHeads * kMostRanges];
  const AttentionArgs& a = p.a;
  const Heads& h = a.heads;
  const int D = int(h.head_dim), group = int(h.n_heads / h.n_kv_heads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = int(blockIdx.y) / p.passes, first_head = int(blockIdx.y) % p.passes * kHeads;
  const int n_heads = min(kHeads, group - first_head);  // of this block
  const int64_t m = blockIdx.z, head0 = int64_t(kv_head) * group + first_head;
  launch_dependents();
  wait_for_predecessors();
  // What does not depend on the position comes first: all these loads are one round trip.
  const int64_t place_kv = m * h.kv_stride + int64_t(kv_head) * D;
  const bool storing = a.with_heads && warp == kWarps - 1;
  HeadValues head{}, new_key{}, new_value{};
  if (warp < n_heads) head = load_head(h.q + m * h.q_stride + (head0 + warp) * D, D);
  if (storing) new_key = load_head(h.k + place_kv, D), new_value = load_head(h.v + place_kv, D);
  const int64_t at = __ldcg(h.position) + (kBeams ? 0 : m);
  const int64_t apart = kBeams ? int64_t{__ldcg(h.beams.first)} : 0;  // the first position that beams have apart
  write_preset(a.preset);

  const int64_t begin = a.window > 0 ? max(int64_t{0}, at - a.window + 1) : 0, seen = at + 1 - begin;
  const int wanted = seen <= kWholeRange ? 1 : int(min(int64_t(p.ranges), (seen + kLeastRange - 1) / kLeastRange));
  const int64_t range = (seen + wanted - 1) / wanted;
  const int ranges = int((seen + range - 1) / range);  // none empty
  if (int(blockIdx.x) >= ranges) return;
  const int64_t from = begin + blockIdx.x * range, end = min(at + 1, from + range);

  const int part = lane % kLanes, place = lane / kLanes;
  const bool has_part = part * 8 < D;
  const int64_t head_place = int64_t(kv_head) * h.cache.capacity * D + part * 8;
  const __half* const keys = reinterpret_cast<const __half*>(h.cache.keys) + head_place;
  const __half* const values = reinterpret_cast<const __half*>(h.cache.values) + head_place;
  uint4 even_k[kBatch], even_v[kBatch], odd_k[kBatch], odd_v[kBatch];
  const auto load = [&](uint4* k, uint4* v, int64_t t0, int64_t first, int64_t last) {  // of positions [first, last)
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t t = t0 + b * kWarps * kPositions + place;
      if (!has_part || t < first || t >= last) continue;
      if (kBeams && t >= apart) {
        const uint32_t slot = __ldcg(h.beams.sources + (t - apart)) >> (8 * m) & 255;
        const CachePlace from = beam_place(h, slot, kv_head, t - apart);
        k[b] = load_cached(from.keys + part * 8);
        v[b] = load_cached(from.values + part * 8);
        continue;
      }
      k[b] = load_cached(keys + t * D);
      v[b] = load_cached(values + t * D);
    }
  };
#pragma unroll
  for (int b = 0; b < kBatch; ++b) even_k[b] = even_v[b] = odd_k[b] = odd_v[b] = make_uint4(0, 0, 0, 0);
  int64_t t0 = from + warp * kPositions;
  const int64_t stored = a.with_heads ? min(end, at) : end;  // before this launch
  load(even_k, even_v, t0, 0, stored);

  if (warp < n_heads) {
    if (a.with_heads) {
      make_head(h, head, h.q_norm, at, heads[warp]);
    } else {
#pragma unroll
      for (int i = 0; i < kMostHeadDim / 32; ++i)
        if (lane + 32 * i < D) heads[warp][lane + 32 * i] = head.v[i];
    }
  }
  if (storing && end == at + 1)
    store_head(h, new_key, new_value, at, kBeams ? beam_place(h, m, kv_head, at - apart) : cache_place(h, kv_head, at),
               scratch);
  __syncthreads();

  float q[kHeads][8], sum[kHeads][8] = {}, top[kHeads], total[kHeads] = {};
  const float scale = a.scale * 1.44269504088896f;  // exponentials are powers of two
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    top[i] = -INFINITY;
#pragma unroll
    for (int e = 0; e < 8; ++e) q[i][e] = has_part && i < n_heads ? heads[i][part * 8 + e] * scale : 0.0f;
  }
  load(even_k, even_v, t0, stored, end);
  const auto add_batch = [&](const uint4* k, const uint4* v) {
    float score[kHeads][kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float key[8];
      unpack(k[b], key);
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        float s = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) s = fmaf(q[i][e], key[e], s);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
        score[i][b] = t0 + b * kWarps * kPositions + place < end ? s : -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float highest = top[i];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) highest = fmaxf(highest, score[i][b]);
      const float keep = shrink(top[i], highest);
      top[i] = highest;
      total[i] *= keep;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[i][e] *= keep;
      const float shift = highest == -INFINITY ? 0.0f : highest;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        score[i][b] = exp2f(score[i][b] - shift);
        total[i] += score[i][b];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float value[8];
      unpack(v[b], value);
#pragma unroll
      for (int i = 0; i < kHeads; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[i][e] = fmaf(score[i][b], value[e], sum[i][e]);
    }
  };
  // While one batch is added up the next one is under way.
  constexpr int kStep = kWarps * kPositions * kBatch;
  while (t0 < end) {
    load(odd_k, odd_v, t0 + kStep, 0, end);
    add_batch(even_k, even_v);
    t0 += kStep;
    if (t0 >= end) break;
    load(even_k, even_v, t0 + kStep, 0, end);
    add_batch(odd_k, odd_v);
    t0 += kStep;
  }

  // Places of a warp, then warps.
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      const float other = __shfl_xor_sync(~0u, top[i], step), highest = fmaxf(top[i], other);
      const float mine = shrink(top[i], highest), theirs = shrink(other, highest);
      top[i] = highest;
      total[i] = total[i] * mine + __shfl_xor_sync(~0u, total[i], step) * theirs;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[i][e] = sum[i][e] * mine + __shfl_xor_sync(~0u, sum[i][e], step) * theirs;
    }
    if (lane == 0) maxima[warp][i] = top[i], totals[warp][i] = total[i];
    if (place == 0 && has_part) {
      float4* const to = reinterpret_cast<float4*>(sums + (warp * kHeads + i) * D + part * 8);
      to[0] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
      to[1] = make_float4(sum[i][4], sum[i][5], sum[i][6], sum[i][7]);
    }
  }
  __syncthreads();
  float* const out = a.out + m * h.q_stride + head0 * D;
  const int64_t stride = D + 2;
  float* const partial = p.partial + (m * h.n_heads + head0) * p.ranges * stride;
  for (int e = threadIdx.x; e < n_heads * D; e += kWarps * 32) {
    const int i = e / D, d = e % D;
    float highest = -INFINITY, all = 0, s = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, maxima[w][i]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float f = shrink(maxima[w][i], highest);
      all = fmaf(totals[w][i], f, all);
      s = fmaf(sums[(w * kHeads + i) * D + d], f, s);
    }
    if (ranges == 1) {
      out[e] = s / all;
      continue;
    }
    float* const to = partial + (int64_t(i) * p.ranges + blockIdx.x) * stride;
    to[d] = s;
    if (d == 0) to[D] = highest, to[D + 1] = all;
  }
  unsigned* const arrived = p.arrived + m * gridDim.y + blockIdx.y;
  if (ranges > 1) {
    if (!last_to_arrive(arrived, unsigned(ranges))) return;
    for (int e = threadIdx.x; e < n_heads * ranges; e += kWarps * 32) {
      const int i = e / ranges, r = e % ranges;
      const float* const of_range = partial + (int64_t(i) * p.ranges + r) * stride + D;
      range_maxima[i * ranges + r] = __ldcg(of_range), range_totals[i * ranges + r] = __ldcg(of_range + 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_heads * D; e += kWarps * 32) {
      const int i = e / D, d = e % D;
      const float* const parts = partial + int64_t(i) * p.ranges * stride + d;
      float highest = -INFINITY, all = 0, s = 0;
      for (int r = 0; r < ranges; ++r) highest = fmaxf(highest, range_maxima[i * ranges + r]);
#pragma unroll 8
      for (int r = 0; r < ranges; ++r) {
        const float f = shrink(range_maxima[i * ranges + r], highest);
        all = fmaf(range_totals[i * ranges + r], f, all);
        s = fmaf(__ldcg(parts + r * stride), f, s);
      }
      out[e] = s / all;
    }
  }
}

/// Query heads of a block: those of a key head, or as many of them as the registers hold.
int heads_of_block(int64_t group) {
  int heads = 1;
  while (heads < group && heads < kMostHeads) heads *= 2;
  return heads;
}
int passes_of(int64_t n_heads, int64_t n_kv_heads) {
  const int64_t group = n_heads / n_kv_heads, heads = heads_of_block(group);
  return int((group + heads - 1) / heads);
}
/// As many as run at the same time.
int most_ranges(const Device& device, int64_t M, int64_t n_heads, int64_t n_kv_heads, int passes) {
  const int64_t blocks = int64_t{device.info().multiprocessors} * resident_blocks(heads_of_block(n_heads / n_kv_heads));
  return int(std::clamp<int64_t>(blocks / (M * n_kv_heads * passes), 1, kMostRanges));
}

template <int kLanes, int kHeads>
void launch_attend(const Device& device, Stream& stream, const AttentionParams& p) {
  const Heads& h = p.a.heads;
  const int64_t shared = int64_t(kWarps) * kHeads * h.head_dim * int64_t(sizeof(float));
  const auto kernel = h.beams.keys != nullptr ? attend<kLanes, kHeads, true> : attend<kLanes, kHeads, false>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  const dim3 blocks(unsigned(p.ranges), unsigned(h.n_kv_heads * p.passes), unsigned(h.M));
  launch_kernel(device, stream, kernel, {blocks, kWarps * 32, shared}, p);
}
template <int kLanes>
void launch_attend(const Device& device, Stream& stream, const AttentionParams& p, int heads) {
  if (heads == 1) launch_attend<kLanes, 1>(device, stream, p);
  if (heads == 2) launch_attend<kLanes, 2>(device, stream, p);
  if (heads == 4) launch_attend<kLanes, 4>(device, stream, p);
  if (heads == 8) launch_attend<kLanes, 8>(device, stream, p);
}

void check_heads(const Heads& h) {
  if (h.head_dim % 8 != 0 || h.head_dim < 8 || h.head_dim > kMostHeadDim)
    throw Error("--device cuda: head_dim = {}; the attention kernels take multiples of 8 up to {}", h.head_dim,
                kMostHeadDim);
  if (h.n_kv_heads < 1 || h.n_heads % h.n_kv_heads != 0)
    throw Error("--device cuda: {} query heads are no multiple of {} key heads", h.n_heads, h.n_kv_heads);
}

}  // namespace

void launch_heads(const Device& device, Stream& stream, const Heads& heads) {
  if (heads.M <= 0) return;
  check_heads(heads);
  if (heads.beams.keys != nullptr) throw Error("keys and values of beams are stored by their attention");
  const dim3 blocks(unsigned((heads.n_heads + heads.n_kv_heads + 3) / 4), unsigned(heads.M));
  launch_kernel(device, stream, prepare_heads, {blocks, 128}, heads);
}

int64_t attention_workspace_bytes(const Device& device, int64_t M, int64_t n_heads, int64_t n_kv_heads,
                                  int64_t head_dim) {
  const int passes = passes_of(n_heads, n_kv_heads);
  const int64_t ranges = most_ranges(device, M, n_heads, n_kv_heads, passes);
  return (M * n_heads * ranges * (head_dim + 2) + M * n_kv_heads * passes) * 4;
}

void launch_attention(const Device& device, Stream& stream, const AttentionArgs& args) {
  const Heads& h = args.heads;
  if (h.M <= 0) return;
  check_heads(h);
  const bool of_beams = h.beams.keys != nullptr;
  if (h.M > 1 && ((args.with_heads && !of_beams) || args.collect.list != nullptr))
    throw Error("attention of {} tokens neither stores keys nor lists active inputs; both are for one token", h.M);
  if (of_beams && (!args.with_heads || h.M > kMostBeams))
    throw Error("attention of {} beams; at most {}, whose keys it stores", h.M, kMostBeams);
  AttentionParams p{};
  p.a = args;
  p.passes = passes_of(h.n_heads, h.n_kv_heads);
  p.ranges = most_ranges(device, h.M, h.n_heads, h.n_kv_heads, p.passes);
  p.partial = reinterpret_cast<float*>(args.workspace);
  p.arrived = reinterpret_cast<unsigned*>(p.partial + h.M * h.n_heads * p.ranges * (h.head_dim + 2));
  const int heads = heads_of_block(h.n_heads / h.n_kv_heads);
  if (h.head_dim <= 64)
    launch_attend<8>(device, stream, p, heads);
  else if (h.head_dim <= 128)
    launch_attend<16>(device, stream, p, heads);
  else
    launch_attend<32>(device, stream, p, heads);
  if (args.collect.list == nullptr) return;
  // A launch of its own: the last block by itself would take longer (3.2 against 2.4 us for 4096 inputs on an H100).
  GateArgs list;
  list.gate = Gate::none;
  list.x = args.out;
  list.count = h.n_heads * h.head_dim;
  list.collect = args.collect;
  launch_gate(device, stream, list);
}

}  // namespace lacuna::cuda
