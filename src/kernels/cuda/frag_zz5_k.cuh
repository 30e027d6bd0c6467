// src/kernels/cuda/frag_zz5_k.cuh - how the GEMV reads zz5_k: codes of 5 bits (layout/q5_K.h, prepared.h).
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz5K : SixBitHeader {
  static constexpr int kCodeBytes = 160;
  struct Codes {
    uint32_t low, high;  // bits 0..3 as in zz4_k; bit 4
  };

  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, uint32_t offset, int lane) {
    const std::byte* const column = codes + offset;
    return {load_stream(reinterpret_cast<const uint32_t*>(column + lane * 4)),
            load_stream(reinterpret_cast<const uint8_t*>(column + 128 + lane))};
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t low = v.low >> 8;
    const uint32_t high = v.high * 0x80010u;  // bits 0 and 4 of the byte to 4 and 8, bits 1 and 5 to 20 and 24
    const uint32_t other = high >> 2;         // bits 2, 6 and 3, 7 there
    sums[0] = __hfma2(as_half2(select_bits(0x000f000fu, v.low, high) & 0x001f001fu), factor, sums[0]);
    sums[1] = __hfma2(as_half2(select_bits(0x00f000f0u, v.low, high) & 0x01f001f0u), factor, sums[1]);
    sums[2] = __hfma2(as_half2(select_bits(0x000f000fu, low, other) & 0x001f001fu), factor, sums[2]);
    sums[3] = __hfma2(as_half2(select_bits(0x00f000f0u, low, other) & 0x01f001f0u), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) { return p % 2 == 0 ? 0x1p24f : 0x1p20f; }
};

}  // namespace lacuna::cuda
