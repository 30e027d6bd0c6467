// src/kernels/cpu/isa/linear_blocks.h - what the linear kernels know of each stored block layout.
//
// Every block layout is the same thing to them: weight = scale[g] * (code - kOffset) + min[g], where g is a group of 16
// or 32 inputs. A `Q...` struct below says how to read the canonical block into fields, of which planes of bits a code
// consists, and which family of scales it has. The families say how the scales of 16 rows lie in a prepared panel.
#pragma once

#include "kernels/cpu/isa/linear_vec.h"
#include "layout/layout.h"
#include "layout/q2_K.h"
#include "layout/q3_K.h"
#include "layout/q4_0.h"
#include "layout/q4_1.h"
#include "layout/q4_K.h"
#include "layout/q5_0.h"
#include "layout/q5_1.h"
#include "layout/q5_K.h"
#include "layout/q6_K.h"
#include "layout/q8_0.h"

namespace lacuna::cpu::LACUNA_ISA {

/// One canonical block of one row, unpacked.
struct Fields {
  alignas(64) uint8_t code[256];
  uint8_t scale[16];  // small integer scales as stored: 4, 6 or 8 bits
  uint8_t min[16];
  uint16_t d = 0, dmin = 0;  // f16 bits
};

/// Scales and mins of one block of 32 inputs of 16 rows, kGroups values a row.
template <int kGroups>
struct BlockScales {
  F32x16 scale[kGroups];
  F32x16 min[kGroups];
};

/// dword `field` of a lane holds 5 six-bit numbers, low bits first; number n of 16 is field n / 5, place n % 5, but
/// number 15 is spread over the 2 top bits of the three dwords.
LACUNA_INLINE void pack_six_bits(const uint8_t* numbers, uint32_t fields[3]) {
  for (int f = 0; f < 3; ++f) {
    fields[f] = uint32_t((numbers[15] >> (2 * f)) & 3) << 30;
    for (int i = 0; i < 5; ++i) fields[f] |= uint32_t(numbers[5 * f + i]) << (6 * i);
  }
}
/// p: 3 x 16 dwords.
LACUNA_INLINE U32x16 load_six_bits(const uint8_t* p, int n) {
  if (n < 15) return (load_u32(p + 64 * (n / 5)) >> (6 * (n % 5))) & 63;
  return (load_u32(p) >> 30) | ((load_u32(p + 64) >> 30) << 2) | ((load_u32(p + 128) >> 30) << 4);
}

/// One f16 scale per block of 32.
struct HalfScale {
  static constexpr int kGroup = 32, kBlocks = 1, kBytes = 32;
  static constexpr bool kMin = false;
  struct Head {};
  LACUNA_INLINE void write(const Fields& f, int r, uint8_t* p) { __builtin_memcpy(p + 2 * r, &f.d, 2); }
  LACUNA_INLINE Head head(const uint8_t*) { return {}; }
  LACUNA_INLINE void load(const Head&, const uint8_t* p, int, BlockScales<1>& out) { out.scale[0] = load_f16(p); }
  LACUNA_INLINE float scale(const Fields& f, int) { return half_to_float(f.d); }
  LACUNA_INLINE float min(const Fields&, int) { return 0; }
};

/// f16 scale and f16 minimum (added) per block of 32.
struct HalfScaleMin {
  static constexpr int kGroup = 32, kBlocks = 1, kBytes = 64;
  static constexpr bool kMin = true;
  struct Head {};
  LACUNA_INLINE void write(const Fields& f, int r, uint8_t* p) {
    __builtin_memcpy(p + 2 * r, &f.d, 2);
    __builtin_memcpy(p + 32 + 2 * r, &f.dmin, 2);
  }
  LACUNA_INLINE Head head(const uint8_t*) { return {}; }
  LACUNA_INLINE void load(const Head&, const uint8_t* p, int, BlockScales<1>& out) {
    out.scale[0] = load_f16(p);
    out.min[0] = load_f16(p + 32);
  }
  LACUNA_INLINE float scale(const Fields& f, int) { return half_to_float(f.d); }
  LACUNA_INLINE float min(const Fields& f, int) { return half_to_float(f.dmin); }
};

/// f16 d and dmin per 256, 6-bit scale and minimum (subtracted) per 32.
struct SixBitScaleMin {
  static constexpr int kGroup = 32, kBlocks = 8, kBytes = 256;
  static constexpr bool kMin = true;
  struct Head {
    F32x16 d, dmin;
  };
  LACUNA_INLINE void write(const Fields& f, int r, uint8_t* p) {
    __builtin_memcpy(p + 2 * r, &f.d, 2);
    __builtin_memcpy(p + 32 + 2 * r, &f.dmin, 2);
    uint8_t numbers[16];
    for (int g = 0; g < 8; ++g) numbers[g] = f.scale[g], numbers[g + 8] = f.min[g];
    uint32_t fields[3];
    pack_six_bits(numbers, fields);
    for (int i = 0; i < 3; ++i) __builtin_memcpy(p + 64 + 64 * i + 4 * r, &fields[i], 4);
  }
  LACUNA_INLINE Head head(const uint8_t* p) { return {load_f16(p), load_f16(p + 32) * splat(-1.0f)}; }
  LACUNA_INLINE void load(const Head& h, const uint8_t* p, int b, BlockScales<1>& out) {
    out.scale[0] = h.d * to_f32(load_six_bits(p + 64, b));
    out.min[0] = h.dmin * to_f32(load_six_bits(p + 64, b + 8));
  }
  LACUNA_INLINE float scale(const Fields& f, int g) { return half_to_float(f.d) * float(f.scale[g]); }
  LACUNA_INLINE float min(const Fields& f, int g) { return -half_to_float(f.dmin) * float(f.min[g]); }
};

/// f16 d per 256, signed byte scale per 16.
struct ByteScale {
  static constexpr int kGroup = 16, kBlocks = 8, kBytes = 288;
  static constexpr bool kMin = false;
  struct Head {
    F32x16 d;
  };
  LACUNA_INLINE void write(const Fields& f, int r, uint8_t* p) {
    __builtin_memcpy(p + 2 * r, &f.d, 2);
    for (int g = 0; g < 16; ++g) p[32 + 16 * g + r] = f.scale[g];
  }
  LACUNA_INLINE Head head(const uint8_t* p) { return {load_f16(p)}; }
  LACUNA_INLINE void load(const Head& h, const uint8_t* p, int b, BlockScales<2>& out) {
    for (int g = 0; g < 2; ++g) out.scale[g] = h.d * load_i8(p + 32 + 16 * (2 * b + g));
  }
  LACUNA_INLINE float scale(const Fields& f, int g) { return half_to_float(f.d) * float(int8_t(f.scale[g])); }
  LACUNA_INLINE float min(const Fields&, int) { return 0; }
};

/// f16 d per 256, 6-bit scale (stored plus 32) per 16.
struct SixBitScale {
  static constexpr int kGroup = 16, kBlocks = 8, kBytes = 224;
  static constexpr bool kMin = false;
  struct Head {
    F32x16 d;
  };
  LACUNA_INLINE void write(const Fields& f, int r, uint8_t* p) {
    __builtin_memcpy(p + 2 * r, &f.d, 2);
    uint32_t fields[3];
    pack_six_bits(f.scale, fields);
    for (int i = 0; i < 3; ++i) __builtin_memcpy(p + 32 + 64 * i + 4 * r, &fields[i], 4);
  }
  LACUNA_INLINE Head head(const uint8_t* p) { return {load_f16(p)}; }
  LACUNA_INLINE void load(const Head& h, const uint8_t* p, int b, BlockScales<2>& out) {
    for (int g = 0; g < 2; ++g) out.scale[g] = h.d * (to_f32(load_six_bits(p + 32, 2 * b + g)) + splat(-32.0f));
  }
  LACUNA_INLINE float scale(const Fields& f, int g) { return half_to_float(f.d) * float(int(f.scale[g]) - 32); }
  LACUNA_INLINE float min(const Fields&, int) { return 0; }
};

/// f16 d and dmin per 256, 4-bit scale and minimum (subtracted) per 16.
struct FourBitScaleMin {
  static constexpr int kGroup = 16, kBlocks = 8, kBytes = 320;
  static constexpr bool kMin = true;
  struct Head {
    F32x16 d, dmin;
  };
  LACUNA_INLINE void write(const Fields& f, int r, uint8_t* p) {
    __builtin_memcpy(p + 2 * r, &f.d, 2);
    __builtin_memcpy(p + 32 + 2 * r, &f.dmin, 2);
    for (int g = 0; g < 16; ++g) p[64 + 16 * g + r] = uint8_t(f.scale[g] | (f.min[g] << 4));
  }
  LACUNA_INLINE Head head(const uint8_t* p) { return {load_f16(p), load_f16(p + 32) * splat(-1.0f)}; }
  LACUNA_INLINE void load(const Head& h, const uint8_t* p, int b, BlockScales<2>& out) {
    for (int g = 0; g < 2; ++g) {
      const U32x16 both = load_u8(p + 64 + 16 * (2 * b + g));
      out.scale[g] = h.d * to_f32(both & 15);
      out.min[g] = h.dmin * to_f32(both >> 4);
    }
  }
  LACUNA_INLINE float scale(const Fields& f, int g) { return half_to_float(f.d) * float(f.scale[g]); }
  LACUNA_INLINE float min(const Fields& f, int g) { return -half_to_float(f.dmin) * float(f.min[g]); }
};

// Each layout: kLow bits of a code in one plane, kHigh more in another; the canonical block read into Fields.

template <class Block>
LACUNA_INLINE void read_nibbles_32(const Block&, const uint8_t* low, Fields& f) {
  for (int j = 0; j < 16; ++j) f.code[j] = low[j] & 15;
  for (int j = 0; j < 16; ++j) f.code[j + 16] = low[j] >> 4;
}
LACUNA_INLINE void add_high_bits_32(const uint8_t* high, Fields& f) {
  uint32_t word;
  __builtin_memcpy(&word, high, 4);
  for (int j = 0; j < 32; ++j) f.code[j] = uint8_t(f.code[j] | ((word >> j & 1) << 4));
}
LACUNA_INLINE void read_six_bit_pairs(const uint8_t* packed, Fields& f) {
  for (int s = 0; s < 4; ++s) {
    f.scale[s] = packed[s] & 63;
    f.min[s] = packed[s + 4] & 63;
    f.scale[s + 4] = uint8_t((packed[s + 8] & 15) | (packed[s] >> 6 << 4));
    f.min[s + 4] = uint8_t((packed[s + 8] >> 4) | (packed[s + 4] >> 6 << 4));
  }
}
LACUNA_INLINE void read_nibbles_256(const uint8_t* low, Fields& f) {
  for (int p = 0; p < 4; ++p) {
    for (int l = 0; l < 32; ++l) f.code[64 * p + l] = low[32 * p + l] & 15;
    for (int l = 0; l < 32; ++l) f.code[64 * p + 32 + l] = low[32 * p + l] >> 4;
  }
}
/// Bits 2q, 2q+1 of byte 32h + l belong to weight 128h + 32q + l.
LACUNA_INLINE void read_pairs_256(const uint8_t* low, Fields& f) {
  for (int h = 0; h < 2; ++h)
    for (int q = 0; q < 4; ++q)
      for (int l = 0; l < 32; ++l) f.code[128 * h + 32 * q + l] = (low[32 * h + l] >> (2 * q)) & 3;
}

struct Q4_0 : HalfScale {
  static constexpr layout::Id kId = layout::Id::q4_0;
  using Block = layout::Q4_0Block;
  static constexpr int kLow = 4, kHigh = 0, kOffset = 8;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.scale.bits;
    read_nibbles_32(b, b.code, f);
  }
};
struct Q4_1 : HalfScaleMin {
  static constexpr layout::Id kId = layout::Id::q4_1;
  using Block = layout::Q4_1Block;
  static constexpr int kLow = 4, kHigh = 0, kOffset = 0;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.scale.bits;
    f.dmin = b.min.bits;
    read_nibbles_32(b, b.code, f);
  }
};
struct Q5_0 : HalfScale {
  static constexpr layout::Id kId = layout::Id::q5_0;
  using Block = layout::Q5_0Block;
  static constexpr int kLow = 4, kHigh = 1, kOffset = 16;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.scale.bits;
    read_nibbles_32(b, b.low, f);
    add_high_bits_32(b.high, f);
  }
};
struct Q5_1 : HalfScaleMin {
  static constexpr layout::Id kId = layout::Id::q5_1;
  using Block = layout::Q5_1Block;
  static constexpr int kLow = 4, kHigh = 1, kOffset = 0;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.scale.bits;
    f.dmin = b.min.bits;
    read_nibbles_32(b, b.low, f);
    add_high_bits_32(b.high, f);
  }
};
struct Q8_0 : HalfScale {
  static constexpr layout::Id kId = layout::Id::q8_0;
  using Block = layout::Q8_0Block;
  static constexpr int kLow = 8, kHigh = 0, kOffset = 128;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.scale.bits;
    for (int j = 0; j < 32; ++j) f.code[j] = uint8_t(uint8_t(b.code[j]) ^ 0x80);
  }
};
struct Q2K : FourBitScaleMin {
  static constexpr layout::Id kId = layout::Id::q2_K;
  using Block = layout::Q2KBlock;
  static constexpr int kLow = 2, kHigh = 0, kOffset = 0;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.d.bits;
    f.dmin = b.dmin.bits;
    for (int g = 0; g < 16; ++g) f.scale[g] = b.scale_min[g] & 15, f.min[g] = b.scale_min[g] >> 4;
    read_pairs_256(b.code, f);
  }
};
struct Q3K : SixBitScale {
  static constexpr layout::Id kId = layout::Id::q3_K;
  using Block = layout::Q3KBlock;
  static constexpr int kLow = 2, kHigh = 1, kOffset = 4;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.d.bits;
    for (int s = 0; s < 16; ++s)
      f.scale[s] = uint8_t((b.scale[s % 8] >> (s < 8 ? 0 : 4) & 15) | (b.scale[8 + s % 4] >> (s / 4 * 2) & 3) << 4);
    read_pairs_256(b.low, f);
    for (int s = 0; s < 8; ++s)
      for (int l = 0; l < 32; ++l) f.code[32 * s + l] = uint8_t(f.code[32 * s + l] | ((b.high[l] >> s & 1) << 2));
  }
};
struct Q4K : SixBitScaleMin {
  static constexpr layout::Id kId = layout::Id::q4_K;
  using Block = layout::Q4KBlock;
  static constexpr int kLow = 4, kHigh = 0, kOffset = 0;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.d.bits;
    f.dmin = b.dmin.bits;
    read_six_bit_pairs(b.scale_min, f);
    read_nibbles_256(b.code, f);
  }
};
struct Q5K : SixBitScaleMin {
  static constexpr layout::Id kId = layout::Id::q5_K;
  using Block = layout::Q5KBlock;
  static constexpr int kLow = 4, kHigh = 1, kOffset = 0;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.d.bits;
    f.dmin = b.dmin.bits;
    read_six_bit_pairs(b.scale_min, f);
    read_nibbles_256(b.low, f);
    for (int s = 0; s < 8; ++s)
      for (int l = 0; l < 32; ++l) f.code[32 * s + l] = uint8_t(f.code[32 * s + l] | ((b.high[l] >> s & 1) << 4));
  }
};
struct Q6K : ByteScale {
  static constexpr layout::Id kId = layout::Id::q6_K;
  using Block = layout::Q6KBlock;
  static constexpr int kLow = 4, kHigh = 2, kOffset = 32;
  LACUNA_INLINE void read(const Block& b, Fields& f) {
    f.d = b.d.bits;
    __builtin_memcpy(f.scale, b.scale, 16);
    for (int h = 0; h < 2; ++h)
      for (int q = 0; q < 4; ++q)
        for (int l = 0; l < 32; ++l)
          f.code[128 * h + 32 * q + l] = uint8_t((b.low[64 * h + 32 * (q % 2) + l] >> (q / 2 * 4) & 15) |
                                                 (b.high[32 * h + l] >> (2 * q) & 3) << 4);
  }
};

template <class L>
constexpr int kMaxCodeOf = (1 << (L::kLow + L::kHigh)) - 1;
template <class L>
constexpr int kGroupsOf = 32 / L::kGroup;

}  // namespace lacuna::cpu::LACUNA_ISA
