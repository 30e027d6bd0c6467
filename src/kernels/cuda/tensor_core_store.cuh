// src/kernels/cuda/tensor_core_store.cuh - groups of tokens, and results as y has them. For .cu files only.
#pragma once

#include <type_traits>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_core_epilogue.cuh"

namespace lacuna::cuda {

/// Outputs of a token.
__device__ __forceinline__ int64_t outputs_of_group(const TensorCoreArgs& a) {
  return a.groups > 0 ? a.w.N / a.groups : a.w.N;
}
/// Tokens [begin, end) of a group.
struct TokenRange {
  int64_t begin, end;
};
__device__ __forceinline__ TokenRange tokens_of_group(const TensorCoreArgs& a, int group) {
  if (a.groups == 0) return {0, a.M};
  return {__ldcg(a.offsets + group), __ldcg(a.offsets + group + 1)};
}

/// The group of a token and its tokens; -1: it is of none.
__device__ __forceinline__ int group_of(const TensorCoreArgs& a, int64_t token, TokenRange& tokens) {
  for (int group = 0; group < max(a.groups, 1); ++group) {
    tokens = tokens_of_group(a, group);
    if (token >= tokens.begin && token < tokens.end) return group;
  }
  return -1;
}

template <Element kType>
__device__ __forceinline__ float to_float(typename ElementType<kType>::type v) {
  if constexpr (kType == Element::f32)
    return v;
  else if constexpr (kType == Element::f16)
    return __half2float(v);
  else
    return __bfloat162float(v);
}
template <Element kType>
__device__ __forceinline__ typename ElementType<kType>::type from_float(float v) {
  if constexpr (kType == Element::f32)
    return v;
  else if constexpr (kType == Element::f16)
    return __float2half_rn(v);
  else
    return __float2bfloat16_rn(v);
}

/// y[at] = (add[at] +) v, of any type: branches on it would cost more than the few instructions here.
__device__ __forceinline__ void store_result(const TensorCoreArgs& a, int64_t at, float v) {
  const bool wide = a.type == Element::f32, brain = a.type == Element::bf16;
  if (a.add != nullptr) {
    if (wide) {
      v += static_cast<const float*>(a.add)[at];
    } else {
      const auto bits = static_cast<const unsigned short*>(a.add)[at];
      v += brain ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
    }
  }
  if (wide)
    static_cast<float*>(a.y)[at] = v;
  else
    static_cast<unsigned short*>(a.y)[at] =
        brain ? __bfloat16_as_ushort(__float2bfloat16_rn(v)) : __half_as_ushort(__float2half_rn(v));
}

/// Results of 16 bytes of y, and whole such pieces.
template <Element kType>
struct ResultPiece {
  using T = typename ElementType<kType>::type;
  static constexpr int kCount = 16 / int(sizeof(T));
  struct __align__(16) Values {
    T of[kCount];
  };
  /// store_result of each, at once. at: a multiple of kCount.
  static __device__ __forceinline__ void store(const TensorCoreArgs& a, int64_t at, const float (&v)[kCount]) {
    Values before{}, out;
    if (a.add != nullptr) before = *reinterpret_cast<const Values*>(static_cast<const T*>(a.add) + at);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      out.of[i] = from_float<kType>(a.add != nullptr ? v[i] + to_float<kType>(before.of[i]) : v[i]);
    *reinterpret_cast<Values*>(static_cast<T*>(a.y) + at) = out;
  }
};

/// Whether rows of y and add begin at whole pieces.
__device__ __forceinline__ bool has_whole_pieces(const TensorCoreArgs& a, int element_bytes) {
  return reinterpret_cast<uintptr_t>(a.y) % 16 == 0 && reinterpret_cast<uintptr_t>(a.add) % 16 == 0 &&
         a.y_stride * element_bytes % 16 == 0;
}

/// use(type) with the type of y as a constant.
template <class Use>
__device__ __forceinline__ void with_element(Element type, const Use& use) {
  switch (type) {
    case Element::f32:
      return use(std::integral_constant<Element, Element::f32>());
    case Element::f16:
      return use(std::integral_constant<Element, Element::f16>());
    case Element::bf16:
      return use(std::integral_constant<Element, Element::bf16>());
  }
}

}  // namespace lacuna::cuda
