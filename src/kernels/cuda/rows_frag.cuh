// src/kernels/cuda/rows_frag.cuh - how the row kernels read each layout (rows.h says where its bytes are). A lane has
// kCols columns of a chunk of 32 kCols; float4 number j of them is columns column(j) to column(j) + 3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.h"

namespace lacuna::cuda {

/// Where the row is and its planes begin.
struct RowView {
  const std::byte* row;
  const uint32_t* plane;  // [kMostPlanes]
  uint32_t K;
  uint32_t group_factor = 0;  // grouped rows

  template <class T>
  __device__ __forceinline__ const T* at(int p, uint32_t entry) const {
    return reinterpret_cast<const T*>(row + plane[p]) + entry;
  }
};

__device__ __forceinline__ float half_bits(uint32_t bits) { return __half2float(__ushort_as_half(uint16_t(bits))); }
__device__ __forceinline__ uint32_t shifted(uint32_t v, int left) { return left >= 0 ? v << left : v >> -left; }

/// Columns 32u to 32u + 31 of a lane: coded layouts.
struct UnitColumns {
  static constexpr int kCols = 32;
  /// Float4 f of x: chunk, float4 of the lane, lane.
  static __device__ __forceinline__ int3 place(int f) { return make_int3(f >> 8, f & 7, f >> 3 & 31); }
  static __device__ __forceinline__ int64_t column(int chunk, int j, int lane) {
    return 32 * (32 * int64_t(chunk) + lane) + 4 * j;
  }
};

struct UnitScales {
  float scale[2], offset[2];  // of columns 0..15 and 16..31: weight = scale * (code - kZero) + offset
};

/// Codes of kBits < 7 bits. A code c becomes the float 128 + (c << 7 - kBits) = 2^(7 - kBits) (2^kBits + c) by one
/// byte permutation, without a conversion; what is too much is the same for all codes and taken off with the sum of x.
template <int kBits>
struct CodedUnit : UnitColumns {
  static constexpr bool kNeedsSums = true;
  static constexpr int kNibbles = kBits >= 4 ? 4 : 0;
  static constexpr int kPairs = kBits == 2 || kBits == 3 || kBits == 6 ? 2 : 0, kSingles = kBits == 3 || kBits == 5;
  struct Codes {
    uint32_t nibble[kNibbles > 0 ? 4 : 1], pair[kPairs > 0 ? 2 : 1], single;
  };
  /// Four codes, each at the top of the lower seven bits of its byte. j: 0..7.
  static __device__ __forceinline__ uint32_t word(const Codes& codes, int j) {
    constexpr int kTop = 7 - kBits;
    uint32_t v = 0;
    if constexpr (kNibbles > 0) v |= shifted(codes.nibble[j % 4], j < 4 ? kTop : kTop - 4) & (0x0f0f0f0fu << kTop);
    if constexpr (kPairs > 0) v |= shifted(codes.pair[j / 4], 5 - kSingles - 2 * (j % 4)) & (0x60606060u >> kSingles);
    if constexpr (kSingles > 0) v |= shifted(codes.single, 6 - j) & 0x40404040u;
    return v;
  }
  static __device__ __forceinline__ float4 values(const Codes& codes, int j) {
    const uint32_t v = word(codes, j);
    return make_float4(
        __uint_as_float(__byte_perm(v, 0x43000000u, 0x7044)), __uint_as_float(__byte_perm(v, 0x43000000u, 0x7144)),
        __uint_as_float(__byte_perm(v, 0x43000000u, 0x7244)), __uint_as_float(__byte_perm(v, 0x43000000u, 0x7344)));
  }
  /// sums: of values * x of the two halves; x_sums: of x.
  template <int kZero, bool kHasOffset>
  static __device__ __forceinline__ float total(const UnitScales& s, const float sums[2], float2 x_sums) {
    constexpr float kUnit = 1.0f / (1 << (7 - kBits)), kExcess = (1 << kBits) + kZero;
    float out = s.scale[0] * fmaf(-kExcess, x_sums.x, sums[0] * kUnit);
    out = fmaf(s.scale[1], fmaf(-kExcess, x_sums.y, sums[1] * kUnit), out);
    if constexpr (kHasOffset) out = fmaf(s.offset[0], x_sums.x, fmaf(s.offset[1], x_sums.y, out));
    return out;
  }
  /// The weights as layout::decode_row rounds them.
  template <int kZero, bool kHasOffset>
  static __device__ __forceinline__ float4 weights(const UnitScales& s, const Codes& codes, int j) {
    float w[4];
    for (int i = 0; i < 4; ++i) {
      const int code = int(word(codes, j) >> (8 * i + 7 - kBits) & ((1u << kBits) - 1));
      w[i] = __fmul_rn(float(code - kZero), s.scale[j / 4]);
      if (kHasOffset) w[i] = __fadd_rn(w[i], s.offset[j / 4]);
    }
    return make_float4(w[0], w[1], w[2], w[3]);
  }
};

/// A layout of coded units: Layout says how codes and scales are read, kZero and kOffset what they mean.
template <class Layout, int kBits, int kZero, bool kHasOffset>
struct CodedFrag : CodedUnit<kBits> {
  using Base = CodedUnit<kBits>;
  struct Unit {
    typename Base::Codes codes;
    typename Layout::Header header;
  };
  static __device__ __forceinline__ Unit load(const RowView& row, int chunk, int lane) {
    const uint32_t u = uint32_t(chunk) * 32 + uint32_t(lane);
    Unit unit{};
    if (u < row.K / 32) Layout::load(row, u, unit.codes, unit.header);
    return unit;
  }
  static __device__ __forceinline__ float4 values(const Unit& unit, int j) { return Base::values(unit.codes, j); }
  static __device__ __forceinline__ float finish(const Unit& unit, int lane, const float sums[2], float2 x_sums) {
    return Base::template total<kZero, kHasOffset>(Layout::scales(unit.header, lane), sums, x_sums);
  }
  static __device__ __forceinline__ float4 weights(const Unit& unit, int lane, int j) {
    return Base::template weights<kZero, kHasOffset>(Layout::scales(unit.header, lane), unit.codes, j);
  }
};

template <class Codes>
__device__ __forceinline__ void load_nibbles(const RowView& row, uint32_t u, Codes& codes) {
  const uint4 v = load_stream(row.at<uint4>(0, u));
  codes.nibble[0] = v.x, codes.nibble[1] = v.y, codes.nibble[2] = v.z, codes.nibble[3] = v.w;
}
template <class Codes>
__device__ __forceinline__ void load_pairs(const RowView& row, int plane, uint32_t u, Codes& codes) {
  const uint2 v = load_stream(row.at<uint2>(plane, u));
  codes.pair[0] = v.x, codes.pair[1] = v.y;
}

/// One scale a unit, and a minimum that is added.
struct OneScale {
  using Header = uint32_t;
  static __device__ __forceinline__ UnitScales scales(Header header, int) {
    const float scale = half_bits(header & 0xffffu), offset = half_bits(header >> 16);
    return {{scale, scale}, {offset, offset}};
  }
};
struct LoadQ4_0 : OneScale {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    header = load_stream(row.at<uint16_t>(1, u));
  }
};
struct LoadQ4_1 : OneScale {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    header = load_stream(row.at<uint32_t>(1, u));
  }
};
struct LoadQ5_0 : OneScale {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    codes.single = load_stream(row.at<uint32_t>(1, u));
    header = load_stream(row.at<uint16_t>(2, u));
  }
};
struct LoadQ5_1 : OneScale {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    codes.single = load_stream(row.at<uint32_t>(1, u));
    header = load_stream(row.at<uint32_t>(2, u));
  }
};

/// d, dmin and the 6-bit scales and mins of eight units (layout/six_bit.h).
struct SixBitScales {
  using Header = uint4;
  static __device__ __forceinline__ UnitScales scales(const Header& header, int lane) {
    // A lane always has the same place in a superblock, so the masks cost nothing in a loop.
    const bool upper = lane & 4;
    const uint32_t shift = 8 * (lane % 4), low = upper ? 15 : 63, high = upper ? 48 : 0;
    const uint32_t a = header.y >> shift, b = header.z >> shift, c = header.w >> shift;
    const uint32_t scale = ((upper ? c : a) & low) | (a >> 2 & high);
    const uint32_t min = ((upper ? c >> 4 : b) & low) | (b >> 2 & high);
    const float s = half_bits(header.x & 0xffffu) * float(scale), m = -(half_bits(header.x >> 16) * float(min));
    return {{s, s}, {m, m}};
  }
};
struct LoadQ4K : SixBitScales {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    header = load_stream(row.at<uint4>(1, u / 8));
  }
};
struct LoadQ5K : SixBitScales {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    codes.single = load_stream(row.at<uint32_t>(1, u));
    header = load_stream(row.at<uint4>(2, u / 8));
  }
};

/// Two signed scales of 8 bits and d.
struct ByteScales {
  struct Header {
    uint32_t scales, d;
  };
  static __device__ __forceinline__ UnitScales scales(const Header& header, int) {
    const float d = half_bits(header.d);
    return {{d * float(int8_t(header.scales)), d * float(int8_t(header.scales >> 8))}, {0, 0}};
  }
};
struct LoadQ6K : ByteScales {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_nibbles(row, u, codes);
    load_pairs(row, 1, u, codes);
    header = {load_stream(row.at<uint16_t>(2, u)), load_stream(row.at<uint16_t>(3, u / 8))};
  }
};
struct LoadQ3K : ByteScales {
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_pairs(row, 0, u, codes);
    codes.single = load_stream(row.at<uint32_t>(1, u));
    header = {load_stream(row.at<uint16_t>(2, u)), load_stream(row.at<uint16_t>(3, u / 8))};
  }
};
/// Two bytes of a 4-bit scale and a 4-bit minimum; d and dmin.
struct LoadQ2K {
  struct Header {
    uint32_t scales, d;
  };
  template <class Codes>
  static __device__ __forceinline__ void load(const RowView& row, uint32_t u, Codes& codes, Header& header) {
    load_pairs(row, 0, u, codes);
    header = {load_stream(row.at<uint16_t>(1, u)), load_stream(row.at<uint32_t>(2, u / 8))};
  }
  static __device__ __forceinline__ UnitScales scales(const Header& header, int) {
    const float d = half_bits(header.d & 0xffffu), dmin = half_bits(header.d >> 16);
    return {{d * float(header.scales & 15u), d * float(header.scales >> 8 & 15u)},
            {-(dmin * float(header.scales >> 4 & 15u)), -(dmin * float(header.scales >> 12 & 15u))}};
  }
};

using FragQ4_0 = CodedFrag<LoadQ4_0, 4, 8, false>;
using FragQ4_1 = CodedFrag<LoadQ4_1, 4, 0, true>;
using FragQ5_0 = CodedFrag<LoadQ5_0, 5, 16, false>;
using FragQ5_1 = CodedFrag<LoadQ5_1, 5, 0, true>;
using FragQ2K = CodedFrag<LoadQ2K, 2, 0, true>;
using FragQ3K = CodedFrag<LoadQ3K, 3, 4, false>;
using FragQ4K = CodedFrag<LoadQ4K, 4, 0, true>;
using FragQ5K = CodedFrag<LoadQ5K, 5, 0, true>;
using FragQ6K = CodedFrag<LoadQ6K, 6, 32, false>;

/// Codes of 8 bits: code + 128 is placed in the last byte of 2^23, and 2^23 + 128 taken off, which is exact.
struct FragQ8_0 : UnitColumns {
  static constexpr bool kNeedsSums = false;
  struct Unit {
    uint32_t code[8], scale;
  };
  static __device__ __forceinline__ Unit load(const RowView& row, int chunk, int lane) {
    const uint32_t u = uint32_t(chunk) * 32 + uint32_t(lane);
    Unit unit{};
    if (u < row.K / 32) {
      const uint4 a = load_stream(row.at<uint4>(0, u)), b = load_stream(row.at<uint4>(1, u));
      unit.code[0] = a.x, unit.code[1] = a.y, unit.code[2] = a.z, unit.code[3] = a.w;
      unit.code[4] = b.x, unit.code[5] = b.y, unit.code[6] = b.z, unit.code[7] = b.w;
      unit.scale = load_stream(row.at<uint16_t>(2, u));
    }
    return unit;
  }
  static __device__ __forceinline__ float4 values(const Unit& unit, int j) {
    const uint32_t v = unit.code[j] ^ 0x80808080u;
    constexpr float kExcess = 8388608.0f + 128.0f;
    return make_float4(__uint_as_float(__byte_perm(v, 0x4b000000u, 0x7440)) - kExcess,
                       __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7441)) - kExcess,
                       __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7442)) - kExcess,
                       __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7443)) - kExcess);
  }
  static __device__ __forceinline__ float finish(const Unit& unit, int, const float sums[2], float2) {
    return half_bits(unit.scale) * (sums[0] + sums[1]);
  }
  static __device__ __forceinline__ float4 weights(const Unit& unit, int, int j) {
    const float4 v = values(unit, j);
    const float s = half_bits(unit.scale);
    return make_float4(v.x * s, v.y * s, v.z * s, v.w * s);
  }
};

/// Scale and zero of each half of a unit of grouped rows: f16 each.
struct GroupedHeader {
  uint32_t half[2];

  static __device__ __forceinline__ GroupedHeader load(const RowView& row, uint32_t u) {
    const uint32_t first = group_of(2 * u, row.group_factor), second = group_of(2 * u + 1, row.group_factor);
    GroupedHeader header;
    header.half[0] = header.half[1] = load_stream(row.at<uint32_t>(kGroupPlane, first));
    // The last unit may have one half alone.
    if (second != first && 32 * u + 16 < row.K) header.half[1] = load_stream(row.at<uint32_t>(kGroupPlane, second));
    return header;
  }
  __device__ __forceinline__ float scale(int h) const { return half_bits(half[h] & 0xffffu); }
  __device__ __forceinline__ float zero(int h) const { return half_bits(half[h] >> 16); }
  /// Four weights as layout::decode_rows rounds them; zeros beyond the row.
  __device__ __forceinline__ float4 weights(const float code[4], int j, int columns) const {
    float w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = 4 * j + i < columns ? __fmul_rn(scale(j / 4), __fsub_rn(code[i], zero(j / 4))) : 0.0f;
    return make_float4(w[0], w[1], w[2], w[3]);
  }
};

/// Grouped rows of 2, 3 and 4 bits: weight = scale * (code - zero).
template <int kBits>
struct GroupedFrag : CodedUnit<kBits> {
  using Base = CodedUnit<kBits>;
  /// code = value * kUnit - kExcess.
  static constexpr float kUnit = 1.0f / (1 << (7 - kBits)), kExcess = 1 << kBits;
  struct Unit {
    typename Base::Codes codes;
    GroupedHeader header;
    int columns;
  };
  static __device__ __forceinline__ Unit load(const RowView& row, int chunk, int lane) {
    const uint32_t u = uint32_t(chunk) * 32 + uint32_t(lane);
    Unit unit{};
    if (32 * u >= row.K) return unit;
    if constexpr (kBits == 4)
      load_nibbles(row, u, unit.codes);
    else
      load_pairs(row, 0, u, unit.codes);
    if constexpr (kBits == 3) unit.codes.single = load_stream(row.at<uint32_t>(1, u));
    unit.header = GroupedHeader::load(row, u);
    unit.columns = int(min(32u, row.K - 32 * u));
    return unit;
  }
  static __device__ __forceinline__ float4 values(const Unit& unit, int j) { return Base::values(unit.codes, j); }
  static __device__ __forceinline__ float finish(const Unit& unit, int, const float sums[2], float2 x_sums) {
    const GroupedHeader& h = unit.header;
    const float low = fmaf(-(kExcess + h.zero(0)), x_sums.x, sums[0] * kUnit);
    const float high = fmaf(-(kExcess + h.zero(1)), x_sums.y, sums[1] * kUnit);
    return fmaf(h.scale(0), low, h.scale(1) * high);
  }
  static __device__ __forceinline__ float4 weights(const Unit& unit, int, int j) {
    const uint32_t word = Base::word(unit.codes, j);
    float code[4];
    for (int i = 0; i < 4; ++i) code[i] = float(word >> (8 * i + 7 - kBits) & ((1u << kBits) - 1));
    return unit.header.weights(code, j, unit.columns);
  }
};

/// Grouped rows of 8 bits: a code is placed in the last byte of 2^23, which is then taken off.
struct GroupedFrag8 : UnitColumns {
  static constexpr bool kNeedsSums = true;
  static constexpr float kUnit = 1, kExcess = 0;  // as in GroupedFrag
  struct Unit {
    uint32_t code[8];
    GroupedHeader header;
    int columns;
  };
  static __device__ __forceinline__ Unit load(const RowView& row, int chunk, int lane) {
    const uint32_t u = uint32_t(chunk) * 32 + uint32_t(lane);
    Unit unit{};
    if (32 * u >= row.K) return unit;
    const uint4 a = load_stream(row.at<uint4>(0, u)), b = load_stream(row.at<uint4>(1, u));
    unit.code[0] = a.x, unit.code[1] = a.y, unit.code[2] = a.z, unit.code[3] = a.w;
    unit.code[4] = b.x, unit.code[5] = b.y, unit.code[6] = b.z, unit.code[7] = b.w;
    unit.header = GroupedHeader::load(row, u);
    unit.columns = int(min(32u, row.K - 32 * u));
    return unit;
  }
  static __device__ __forceinline__ float4 values(const Unit& unit, int j) {
    const uint32_t v = unit.code[j];
    constexpr float kPlaced = 8388608.0f;
    return make_float4(__uint_as_float(__byte_perm(v, 0x4b000000u, 0x7440)) - kPlaced,
                       __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7441)) - kPlaced,
                       __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7442)) - kPlaced,
                       __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7443)) - kPlaced);
  }
  static __device__ __forceinline__ float finish(const Unit& unit, int, const float sums[2], float2 x_sums) {
    const GroupedHeader& h = unit.header;
    return fmaf(h.scale(0), fmaf(-h.zero(0), x_sums.x, sums[0]), h.scale(1) * fmaf(-h.zero(1), x_sums.y, sums[1]));
  }
  static __device__ __forceinline__ float4 weights(const Unit& unit, int, int j) {
    const float4 v = values(unit, j);
    const float code[4] = {v.x, v.y, v.z, v.w};
    return unit.header.weights(code, j, unit.columns);
  }
};

/// Bitmask rows: those of Dense, a GroupedFrag, and which weights are kept.
template <class Dense>
struct MaskedFrag : UnitColumns {
  static constexpr bool kNeedsSums = false;
  struct Unit {
    typename Dense::Unit dense;
    uint32_t mask;
  };
  static __device__ __forceinline__ Unit load(const RowView& row, int chunk, int lane) {
    Unit unit{Dense::load(row, chunk, lane), 0};
    const uint32_t u = uint32_t(chunk) * 32 + uint32_t(lane);
    if (32 * u < row.K) unit.mask = load_stream(row.at<uint32_t>(kMaskPlane, u));
    return unit;
  }
  /// Zeros where nothing is kept; else weights but for the scale, of columns that have one each half.
  static __device__ __forceinline__ float4 values(const Unit& unit, int j) {
    const float4 v = Dense::values(unit.dense, j);
    const float zero = -(Dense::kExcess + unit.dense.header.zero(j / 4));
    const uint32_t mask = unit.mask >> (4 * j);
    return make_float4(mask & 1 ? fmaf(v.x, Dense::kUnit, zero) : 0, mask & 2 ? fmaf(v.y, Dense::kUnit, zero) : 0,
                       mask & 4 ? fmaf(v.z, Dense::kUnit, zero) : 0, mask & 8 ? fmaf(v.w, Dense::kUnit, zero) : 0);
  }
  static __device__ __forceinline__ float finish(const Unit& unit, int, const float sums[2], float2) {
    return fmaf(unit.dense.header.scale(0), sums[0], unit.dense.header.scale(1) * sums[1]);
  }
  static __device__ __forceinline__ float4 weights(const Unit& unit, int lane, int j) {
    const float4 w = Dense::weights(unit.dense, lane, j);
    const uint32_t mask = unit.mask >> (4 * j);
    return make_float4(mask & 1 ? w.x : 0, mask & 2 ? w.y : 0, mask & 4 ? w.z : 0, mask & 8 ? w.w : 0);
  }
};

/// Floats: the lanes' loads of 16 bytes lie side by side.
template <class Value>
struct FloatFrag {
  static constexpr bool kNeedsSums = false;
  static constexpr int kLoads = 4, kOfLoad = 16 / int(sizeof(Value)), kCols = kLoads * kOfLoad;
  static constexpr int kQuads = kOfLoad / 4;  // of a load
  struct Unit {
    uint4 v[kLoads];
  };
  static __device__ __forceinline__ int3 place(int f) {
    constexpr int kOfChunk = 32 * kCols / 4, kOfLanes = 32 * kQuads;
    const int in_chunk = f % kOfChunk, in_load = in_chunk % kOfLanes;
    return make_int3(f / kOfChunk, in_chunk / kOfLanes * kQuads + in_load % kQuads, in_load / kQuads);
  }
  static __device__ __forceinline__ int64_t column(int chunk, int j, int lane) {
    return int64_t(chunk) * 32 * kCols + j / kQuads * 32 * kOfLoad + lane * kOfLoad + j % kQuads * 4;
  }
  static __device__ __forceinline__ Unit load(const RowView& row, int chunk, int lane) {
    Unit unit{};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t group = uint32_t((chunk * kLoads + i) * 32 + lane);
      if (group * kOfLoad < row.K) unit.v[i] = load_stream(row.at<uint4>(0, group));
    }
    return unit;
  }
  static __device__ __forceinline__ float4 values(const Unit& unit, int j) {
    const uint4 v = unit.v[j / kQuads];
    if constexpr (sizeof(Value) == 4) {
      return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    } else {
      const uint32_t a = j % 2 == 0 ? v.x : v.z, b = j % 2 == 0 ? v.y : v.w;
      if constexpr (std::is_same_v<Value, __half>)
        return make_float4(half_bits(a & 0xffffu), half_bits(a >> 16), half_bits(b & 0xffffu), half_bits(b >> 16));
      else
        return make_float4(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u), __uint_as_float(b << 16),
                           __uint_as_float(b & 0xffff0000u));
    }
  }
  static __device__ __forceinline__ float finish(const Unit&, int, const float sums[2], float2) {
    return sums[0] + sums[1];
  }
  static __device__ __forceinline__ float4 weights(const Unit& unit, int, int j) { return values(unit, j); }
};
using FragF32 = FloatFrag<float>;
using FragF16 = FloatFrag<__half>;
using FragBf16 = FloatFrag<__nv_bfloat16>;

}  // namespace lacuna::cuda
