// src/kernels/cuda/frag_zz5_k.cuh - how the GEMV reads zz5_k: codes of 5 bits (layout/q5_K.h, prepared.h).
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz5K : SixBitHeader {
  static constexpr int kCodeBytes = 160;
  struct Codes {
    uint32_t word, byte;
  };

  template <class Offset>
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, Offset offset, int lane) {
    return {load_lane<uint32_t>(codes, offset, lane), load_lane<uint8_t>(codes + 128, offset, lane)};
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t upper = v.word >> 10;
    const uint32_t last = v.byte * 0x2002u;  // the byte's halves to bits 1 to 4 and 17 to 20
    sums[0] = __hfma2(as_half2(v.word & 0x001f001fu), factor, sums[0]);
    sums[1] = __hfma2(as_half2(v.word & 0x03e003e0u), factor, sums[1]);
    sums[2] = __hfma2(as_half2(upper & 0x001f001fu), factor, sums[2]);
    sums[3] = __hfma2(as_half2(select_bits(0x00200020u, upper, last) & 0x003e003eu), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) { return p == 1 ? 0x1p19f : p == 3 ? 0x1p23f : 0x1p24f; }
};

}  // namespace lacuna::cuda
