// src/kernels/cuda/frag_zz3_k.cuh - how the GEMV reads zz3_k: codes of 3 bits, 4 for a zero, 16 groups of 16 outputs
// with 6-bit scales, 32 for a zero (layout/q3_K.h, prepared.h).
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz3K {
  static constexpr int kCodeBytes = 96, kHeaderBytes = 16, kGroups = 16, kTop = 9;
  static constexpr bool kHasMins = true;
  using Header = uint4;
  struct Codes {
    uint32_t half, byte;
  };

  template <class Offset>
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, Offset offset, int lane) {
    return {load_lane<uint16_t>(codes, offset, lane), load_lane<uint8_t>(codes + 64, offset, lane)};
  }
  static __device__ __forceinline__ Header load_header(const std::byte* headers, uint32_t column) {
    return load_stream(reinterpret_cast<const uint4*>(headers) + column);
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t first = spread_bytes(v.half);
    const uint32_t last = v.byte * 0x20020u;  // the byte's halves to bits 5 to 8 and 21 to 24
    sums[0] = __hfma2(as_half2(first & 0x00070007u), factor, sums[0]);
    sums[1] = __hfma2(as_half2(first & 0x00380038u), factor, sums[1]);
    sums[2] = __hfma2(as_half2(select_bits(0x00c000c0u, first, last) & 0x01c001c0u), factor, sums[2]);
    sums[3] = __hfma2(as_half2(last & 0x00e000e0u), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) {
    return p == 0 ? 0x1p24f : p == 1 ? 0x1p21f : p == 2 ? 0x1p18f : 0x1p19f;
  }

  static __device__ __forceinline__ float magnitude(const Header& header, float x) {
    return x * __low2float(as_half2(header.w));
  }
  template <int kSplit>
  static __device__ __forceinline__ void factors(const Header& header, int part, float, float magnitude, float norm,
                                                 float back, __half2 (&factors)[kGroups / kSplit / 2],
                                                 float (&mins)[kGroups / kSplit]) {
    constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0x30303030u;
    const uint32_t scales[4] = {
        (header.x & kLow) | (header.z << 4 & kHigh), (header.y & kLow) | (header.z << 2 & kHigh),
        (header.x >> 4 & kLow) | (header.z & kHigh), (header.y >> 4 & kLow) | (header.z >> 2 & kHigh)};
    make_factors<kSplit>(scales, part, 32, magnitude, norm, factors);
    add_zeros(factors, 4, back, mins);
  }
};

}  // namespace lacuna::cuda
