// src/kernels/cuda/frag_zz4_k.cuh - how the GEMV reads zz4_k: codes of 4 bits, 8 groups of 32 outputs with 6-bit scales
// and mins (layout/q4_K.h, prepared.h).
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

struct FragZz4K {
  static constexpr int kCodeBytes = 128, kHeaderBytes = 16;
  static constexpr int kGroups = 8;     // of outputs that share a scale
  static constexpr int kScaleBits = 6;  // scales are below 2^6
  using Codes = uint32_t;               // of one lane and column: 8 outputs
  using Header = uint4;                 // of one column

  /// offset: bytes from `codes` to the column.
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, uint32_t offset, int lane) {
    return load_stream(reinterpret_cast<const uint32_t*>(codes + (offset + uint32_t(lane) * 4)));
  }
  static __device__ __forceinline__ Header load_header(const std::byte* headers, uint32_t column) {
    return load_stream(reinterpret_cast<const uint4*>(headers) + column);
  }

  /// sums[p] += codes of outputs p and p + 4 times factor, read as subnormal halves: 2^-24 of the code for p = 0, 2 and
  /// 2^-20 for p = 1, 3.
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    const uint32_t high = v >> 8;
    sums[0] = __hfma2(as_half2(v & 0x000f000fu), factor, sums[0]);
    sums[1] = __hfma2(as_half2(v & 0x00f000f0u), factor, sums[1]);
    sums[2] = __hfma2(as_half2(high & 0x000f000fu), factor, sums[2]);
    sums[3] = __hfma2(as_half2(high & 0x00f000f0u), factor, sums[3]);
  }
  static __device__ constexpr float unit(int p) { return p % 2 == 0 ? 0x1p24f : 0x1p20f; }

  /// The size that the factors of a chunk are made relative to.
  static __device__ __forceinline__ float magnitude(const Header& header, float x) {
    return x * __low2float(as_half2(header.x));
  }

  /// factors[g / 2] = x * scale of groups g and g + 1, times norm; mins[g] += x * min.
  static __device__ __forceinline__ void factors(const Header& header, float x, float magnitude, float norm, float,
                                                 __half2 factors[kGroups / 2], float mins[kGroups]) {
    const float x_min = x * __high2float(as_half2(header.x));
    const __half2 f = __float2half2_rn(magnitude * norm);
    // Six bits of eight scales and eight mins, four to a word.
    const uint32_t scales[2] = {header.y & 0x3f3f3f3fu, (header.w & 0x0f0f0f0fu) | (header.y >> 2 & 0x30303030u)};
    const uint32_t minima[2] = {header.z & 0x3f3f3f3fu, (header.w >> 4 & 0x0f0f0f0fu) | (header.z >> 2 & 0x30303030u)};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      factors[p] = __hmul2(halves(scales[p / 2], p % 2), f);
      const float2 m = __half22float2(halves(minima[p / 2], p % 2));
      mins[2 * p] = fmaf(x_min, m.x, mins[2 * p]);
      mins[2 * p + 1] = fmaf(x_min, m.y, mins[2 * p + 1]);
    }
  }

 private:
  /// Bytes 2i and 2i + 1 of v as halves: below a mantissa's 1024, which is then subtracted.
  static __device__ __forceinline__ __half2 halves(uint32_t v, int i) {
    return __hsub2(as_half2(__byte_perm(v, 0x64646464u, i == 0 ? 0x4140 : 0x4342)), __float2half2_rn(1024.0f));
  }
};

}  // namespace lacuna::cuda
