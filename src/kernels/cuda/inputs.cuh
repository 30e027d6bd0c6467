// src/kernels/cuda/inputs.cuh - how kernels that stage the inputs of one token read them. For .cu files only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/groups.h"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

/// Inputs as GroupsArgs has them.
struct GemvInputs {
  const float *x, *up, *norms;
  float threshold;
  int K;
};

/// One of `askers` asks for its part. One thread of each.
__device__ __forceinline__ void ask_for(const Upcoming& next, uint32_t asker, uint32_t askers) {
  if (next.early == 0) return;
  for (uint32_t share = asker; share < next.shares; share += askers) {
    const uint32_t begin = next.of_share * share + min(share, next.larger);
    const uint32_t count = min(next.early, next.of_share + (share < next.larger ? 1 : 0));
    if (count > 0) prefetch_l2(next.records + size_t(begin) * next.record_bytes, count * next.record_bytes);
  }
}

/// Values k to k + 7 of x; zeros from K on.
__device__ __forceinline__ void load_eight(const float* x, int k, int K, float (&v)[8]) {
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    const int at = k + half;
    if (at + 4 <= K) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(x + at));
      v[half] = four.x, v[half + 1] = four.y, v[half + 2] = four.z, v[half + 3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[half + i] = at + i < K ? __ldcg(x + at + i) : 0.0f;
    }
  }
}

/// Inputs k to k + 7; zeros beyond K and where not active.
__device__ __forceinline__ void load_inputs(const GemvInputs& p, int k, float (&v)[8]) {
  load_eight(p.x, k, p.K, v);
  if (p.up != nullptr) {
    float up[8];
    load_eight(p.up, k, p.K, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = silu(v[i]) * up[i];
  }
  if (p.threshold > 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float norm = p.norms == nullptr || k + i >= p.K ? 1.0f : __ldg(p.norms + k + i);
      if (fabsf(v[i]) * norm < p.threshold) v[i] = 0;
    }
  }
}

__device__ __forceinline__ uint32_t largest_bits(const float (&v)[8]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
  return most;
}

}  // namespace lacuna::cuda
