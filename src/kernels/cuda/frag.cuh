// src/kernels/cuda/frag.cuh - what the GEMV's fragments share. A fragment says how codes and headers of a layout are
// read:
//   kCodeBytes, kHeaderBytes     of a superblock (prepared.h)
//   kGroups                      of outputs that share a scale: 8 or 16
//   kTop                         what magnitude() gives is made smaller than 2^(kTop + 1): such that no sum of eight
//                                products overflows
//   kHasMins                     factors() writes mins
//   Codes, Header                of one lane and column: 8 outputs; of one column
//   load_codes(codes, offset, lane)   offset: bytes from `codes` to the column; see load_lane()
//   load_header(headers, column)
//   add(codes, factor, sums)     sums[p] += codes of outputs p and p + 4 times factor; codes are read as
//                                subnormal halves
//   unit(p)                      what sums[p] is to be multiplied with: one over a code of 1 as add() reads it
//   magnitude(header, x)         the size that the factors of a chunk are made relative to
//   factors<kSplit>(header, part, x, magnitude, norm, back, factors, mins)
//       The kGroups / kSplit groups from part * kGroups / kSplit on: factors[g / 2] = x * scale of groups g and g + 1,
//       times norm; mins[g] += what the sums of codes are too large by: x * min, or x * scale * (the code of a zero).
//       The latter takes the factor as it was rounded, so that its rounding error is multiplied with code minus zero.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

/// The lane's number of a plane. offset: size_t where the compiler knows it, so that it becomes part of the
/// instruction; uint32_t where it does not: sums of 32 bits take half the registers and instructions.
template <class Number, class Offset>
__device__ __forceinline__ auto load_lane(const std::byte* plane, Offset offset, int lane) {
  return load_stream(reinterpret_cast<const Number*>(plane + (offset + Offset(lane) * Offset(sizeof(Number)))));
}

/// Bits of a where mask has ones, else those of b.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}

/// Bytes 2i and 2i + 1 of v, minus zero, as halves: they become the low bits of a mantissa of 1024, which is then
/// subtracted.
__device__ __forceinline__ __half2 halves(uint32_t v, int i, float zero = 0) {
  return __hsub2(as_half2(__byte_perm(v, 0x64646464u, i == 0 ? 0x4140 : 0x4342)), __float2half2_rn(1024.0f + zero));
}

/// Bytes 0 and 1 of v as the low bytes of two 16-bit numbers.
__device__ __forceinline__ uint32_t spread_bytes(uint32_t v) { return __byte_perm(v, 0, 0x4140); }

/// What lanes of part `part` of kSplit need of words that hold the groups' scales in order: whole words, or, where that
/// is half a word, that half in the low bits.
template <int kSplit, int kWords>
struct Share {
  static constexpr int kMine = kWords >= kSplit ? kWords / kSplit : 1;
  uint32_t word[kMine];

  __device__ __forceinline__ Share(const uint32_t (&all)[kWords], int part) {
    static_assert(kWords >= kSplit || kWords * 2 == kSplit);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      word[i] = all[i];
#pragma unroll
      for (int p = 1; p < kSplit; ++p)
        if (part == p) word[i] = all[p * kWords / kSplit + i];
    }
    if (kWords < kSplit && part % 2 == 1) word[0] >>= 16;
  }
};

/// Factors of the groups whose scales, one a byte and `zero` more than they are, are in `scales`.
template <int kSplit, int kWords, int kPairs>
__device__ __forceinline__ void make_factors(const uint32_t (&scales)[kWords], int part, float zero, float magnitude,
                                             float norm, __half2 (&factors)[kPairs]) {
  const Share<kSplit, kWords> mine(scales, part);
  const __half2 f = __float2half2_rn(magnitude * norm);
#pragma unroll
  for (int p = 0; p < kPairs; ++p) factors[p] = __hmul2(halves(mine.word[p / 2], p % 2, zero), f);
}

/// mins[g] += x_min * min of the groups whose mins, one a byte, are in `minima`.
template <int kSplit, int kWords, int kMins>
__device__ __forceinline__ void add_mins(const uint32_t (&minima)[kWords], int part, float x_min,
                                         float (&mins)[kMins]) {
  const Share<kSplit, kWords> mine(minima, part);
#pragma unroll
  for (int p = 0; p < kMins / 2; ++p) {
    const float2 m = __half22float2(halves(mine.word[p / 2], p % 2));
    mins[2 * p] = fmaf(x_min, m.x, mins[2 * p]);
    mins[2 * p + 1] = fmaf(x_min, m.y, mins[2 * p + 1]);
  }
}

/// mins[g] += code_of_zero * factor / norm. back: 1 / norm.
template <int kPairs>
__device__ __forceinline__ void add_zeros(const __half2 (&factors)[kPairs], float code_of_zero, float back,
                                          float (&mins)[2 * kPairs]) {
  const float size = code_of_zero * back;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const float2 f = __half22float2(factors[p]);
    mins[2 * p] = fmaf(f.x, size, mins[2 * p]);
    mins[2 * p + 1] = fmaf(f.y, size, mins[2 * p + 1]);
  }
}

/// The header of q4_K and q5_K: d, dmin, scales and mins of 6 bits (layout/six_bit.h).
struct SixBitHeader {
  static constexpr int kHeaderBytes = 16, kGroups = 8, kTop = 8;
  static constexpr bool kHasMins = true;
  using Header = uint4;

  static __device__ __forceinline__ Header load_header(const std::byte* headers, uint32_t column) {
    return load_stream(reinterpret_cast<const uint4*>(headers) + column);
  }
  static __device__ __forceinline__ float magnitude(const Header& header, float x) {
    return x * __low2float(as_half2(header.x));
  }
  template <int kSplit>
  static __device__ __forceinline__ void factors(const Header& header, int part, float x, float magnitude, float norm,
                                                 float, __half2 (&factors)[kGroups / kSplit / 2],
                                                 float (&mins)[kGroups / kSplit]) {
    const uint32_t scales[2] = {header.y & 0x3f3f3f3fu, (header.w & 0x0f0f0f0fu) | (header.y >> 2 & 0x30303030u)};
    const uint32_t minima[2] = {header.z & 0x3f3f3f3fu, (header.w >> 4 & 0x0f0f0f0fu) | (header.z >> 2 & 0x30303030u)};
    make_factors<kSplit>(scales, part, 0, magnitude, norm, factors);
    add_mins<kSplit>(minima, part, x * __high2float(as_half2(header.x)), mins);
  }
};

/// Sixteen bytes of scales, then d and two bytes more.
struct ByteHeader {
  uint32_t scales[4];
  uint32_t d;

  /// Five words, which lie next to those of other lanes: through L1.
  static __device__ __forceinline__ ByteHeader load(const std::byte* headers, uint32_t column) {
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(headers) + size_t(column) * 5;
    return {{__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3)}, __ldg(from + 4)};
  }
};

}  // namespace lacuna::cuda
