// src/kernels/cuda/frag_zz4_k.cuh - how the GEMV reads zz4_k: codes of 4 bits (layout/q4_K.h, prepared.h).
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz4K : SixBitHeader {
  static constexpr int kCodeBytes = 128;
  using Codes = uint32_t;

  template <class Offset>
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, Offset offset, int lane) {
    return load_lane<uint32_t>(codes, offset, lane);
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t high = v >> 8;
    sums[0] = __hfma2(as_half2(v & 0x000f000fu), factor, sums[0]);
    sums[1] = __hfma2(as_half2(v & 0x00f000f0u), factor, sums[1]);
    sums[2] = __hfma2(as_half2(high & 0x000f000fu), factor, sums[2]);
    sums[3] = __hfma2(as_half2(high & 0x00f000f0u), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) { return p % 2 == 0 ? 0x1p24f : 0x1p20f; }
};

}  // namespace lacuna::cuda
