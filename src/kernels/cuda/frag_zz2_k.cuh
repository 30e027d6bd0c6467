// src/kernels/cuda/frag_zz2_k.cuh - how the GEMV reads zz2_k: codes of 2 bits, 16 groups of 16 outputs with 4-bit
// scales and mins (layout/q2_K.h, prepared.h).
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz2K {
  static constexpr int kCodeBytes = 64, kHeaderBytes = 20, kGroups = 16, kTop = 10;
  static constexpr bool kHasMins = true;
  using Header = ByteHeader;
  using Codes = uint32_t;

  template <class Offset>
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, Offset offset, int lane) {
    return load_lane<uint16_t>(codes, offset, lane);
  }
  static __device__ __forceinline__ Header load_header(const std::byte* headers, uint32_t column) {
    return ByteHeader::load(headers, column);
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t spread = spread_bytes(v);
    sums[0] = __hfma2(as_half2(spread & 0x00030003u), factor, sums[0]);
    sums[1] = __hfma2(as_half2(spread & 0x000c000cu), factor, sums[1]);
    sums[2] = __hfma2(as_half2(spread & 0x00300030u), factor, sums[2]);
    sums[3] = __hfma2(as_half2(spread & 0x00c000c0u), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) { return 0x1p24f / float(1 << 2 * p); }

  static __device__ __forceinline__ float magnitude(const Header& header, float x) {
    return x * __low2float(as_half2(header.d));
  }
  template <int kSplit>
  static __device__ __forceinline__ void factors(const Header& header, int part, float x, float magnitude, float norm,
                                                 float, __half2 (&factors)[kGroups / kSplit / 2],
                                                 float (&mins)[kGroups / kSplit]) {
    uint32_t scales[4], minima[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scales[i] = header.scales[i] & 0x0f0f0f0fu, minima[i] = header.scales[i] >> 4 & 0x0f0f0f0fu;
    make_factors<kSplit>(scales, part, 0, magnitude, norm, factors);
    add_mins<kSplit>(minima, part, x * __high2float(as_half2(header.d)), mins);
  }
};

}  // namespace lacuna::cuda
