// src/kernels/cuda/frag_zz6_k.cuh - how the GEMV reads zz6_k: codes of 6 bits, 32 for a zero, 16 groups of 16 outputs
// with signed 8-bit scales (layout/q6_K.h, prepared.h).
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz6K {
  static constexpr int kCodeBytes = 192, kHeaderBytes = 20, kGroups = 16, kTop = 7;
  static constexpr bool kHasMins = true;
  using Header = ByteHeader;
  struct Codes {
    uint32_t word, half;
  };

  template <class Offset>
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, Offset offset, int lane) {
    return {load_lane<uint32_t>(codes, offset, lane), load_lane<uint16_t>(codes + 128, offset, lane)};
  }
  static __device__ __forceinline__ Header load_header(const std::byte* headers, uint32_t column) {
    return ByteHeader::load(headers, column);
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t upper = v.word >> 6, rest = spread_bytes(v.half);
    sums[0] = __hfma2(as_half2(v.word & 0x003f003fu), factor, sums[0]);
    sums[1] = __hfma2(as_half2(upper & 0x003f003fu), factor, sums[1]);
    sums[2] = __hfma2(as_half2(select_bits(0x03c003c0u, upper, rest << 4) & 0x03f003f0u), factor, sums[2]);
    sums[3] = __hfma2(as_half2(rest & 0x00fc00fcu), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) { return p == 2 ? 0x1p20f : p == 3 ? 0x1p22f : 0x1p24f; }

  static __device__ __forceinline__ float magnitude(const Header& header, float x) {
    return x * __low2float(as_half2(header.d));
  }
  template <int kSplit>
  static __device__ __forceinline__ void factors(const Header& header, int part, float, float magnitude, float norm,
                                                 float back, __half2 (&factors)[kGroups / kSplit / 2],
                                                 float (&mins)[kGroups / kSplit]) {
    constexpr uint32_t kSigns = 0x80808080u;  // scale + 128
    const uint32_t scales[4] = {header.scales[0] ^ kSigns, header.scales[1] ^ kSigns, header.scales[2] ^ kSigns,
                                header.scales[3] ^ kSigns};
    make_factors<kSplit>(scales, part, 128, magnitude, norm, factors);
    add_zeros(factors, 32, back, mins);
  }
};

}  // namespace lacuna::cuda
