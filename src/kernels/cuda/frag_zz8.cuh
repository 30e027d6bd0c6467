// src/kernels/cuda/frag_zz8.cuh - how the GEMV reads zz8: codes of 8 bits, stored plus 128, 8 groups of 32 outputs with
// a f16 scale each (layout/q8_0.h, prepared.h). Codes become what they are before they are multiplied, since the
// offset would make the sums' rounding error more than twice as large: with 8 bits that shows.
#pragma once

#include "kernels/cuda/frag.cuh"

namespace lacuna::cuda {

struct FragZz8 {
  static constexpr int kCodeBytes = 256, kHeaderBytes = 16, kGroups = 8, kTop = 4;
  static constexpr bool kHasMins = false;
  using Header = uint4;  // eight scales
  using Codes = uint2;

  template <class Offset>
  static __device__ __forceinline__ Codes load_codes(const std::byte* codes, Offset offset, int lane) {
    return load_lane<uint2>(codes, offset, lane);
  }
  static __device__ __forceinline__ Header load_header(const std::byte* headers, uint32_t column) {
    return load_stream(reinterpret_cast<const uint4*>(headers) + column);
  }
  static __device__ __forceinline__ void add(Codes v, __half2 factor, __half2 sums[4]) {
    sums[0] = __hfma2(signed_bytes(v.x, 0x4240), factor, sums[0]);
    sums[1] = __hfma2(signed_bytes(v.x, 0x4341), factor, sums[1]);
    sums[2] = __hfma2(signed_bytes(v.y, 0x4240), factor, sums[2]);
    sums[3] = __hfma2(signed_bytes(v.y, 0x4341), factor, sums[3]);
  }
  static __device__ constexpr float unit(int) { return 1; }

  /// Of the largest scale: there is no d.
  static __device__ __forceinline__ float magnitude(const Header& header, float x) {
    const __half2 a = __hmax2(__habs2(as_half2(header.x)), __habs2(as_half2(header.y)));
    const __half2 b = __hmax2(__habs2(as_half2(header.z)), __habs2(as_half2(header.w)));
    const float2 most = __half22float2(__hmax2(a, b));
    return x * fmaxf(most.x, most.y);
  }
  template <int kSplit>
  static __device__ __forceinline__ void factors(const Header& header, int part, float x, float, float norm, float,
                                                 __half2 (&factors)[kGroups / kSplit / 2],
                                                 float (&)[kGroups / kSplit]) {
    const uint32_t scales[4] = {header.x, header.y, header.z, header.w};
    const Share<kSplit, 4> mine(scales, part);
#pragma unroll
    for (int p = 0; p < kGroups / kSplit / 2; ++p) {
      const float2 scale = __half22float2(as_half2(mine.word[p]));
      factors[p] = __floats2half2_rn(x * scale.x * norm, x * scale.y * norm);
    }
  }

 private:
  /// Two bytes, minus 128, as halves (frag.cuh, halves()).
  static __device__ __forceinline__ __half2 signed_bytes(uint32_t v, uint32_t which) {
    return __hsub2(as_half2(__byte_perm(v, 0x64646464u, which)), __float2half2_rn(1024.0f + 128.0f));
  }
};

}  // namespace lacuna::cuda
