// src/kernels/cuda/tensor_core_epilogue.cuh - from sums of tensor cores to outputs. For .cu files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// GELU's tanh form, 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), off by a few roundings of float32.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1 + __expf(-2 * u));
}

/// What is the same for all tokens of one output.
struct OutputTerms {
  float scale = 1, bias = 0, gate = 1;
  bool activate = false;

  OutputTerms() = default;
  /// n: a row of w; in_group: of its group.
  __device__ __forceinline__ OutputTerms(const TensorCoreArgs& a, int64_t n, int64_t in_group) {
    if (a.w.scale != nullptr) scale = a.w.scale[n];
    if (a.bias != nullptr) bias = a.bias[n];
    if (a.gate != nullptr) gate = a.gate[n];
    activate = a.activation == TensorCoreActivation::gelu_tanh && in_group >= a.activation_from;
  }
  /// x_scale: of the token; 1 where there are none. kActivate: as `activate` says, which is the same for 64 outputs.
  template <bool kActivate>
  __device__ __forceinline__ float finish(float sum, float x_scale) const {
    const float v = fmaf(sum * x_scale, scale, bias);
    return (kActivate ? gelu_tanh(v) : v) * gate;
  }
  __device__ __forceinline__ float finish(float sum, float x_scale) const {
    return activate ? finish<true>(sum, x_scale) : finish<false>(sum, x_scale);
  }
};

template <Element kType>
struct ElementType;
template <>
struct ElementType<Element::f32> {
  using type = float;
};
template <>
struct ElementType<Element::f16> {
  using type = __half;
};
template <>
struct ElementType<Element::bf16> {
  using type = __nv_bfloat16;
};

}  // namespace lacuna::cuda
