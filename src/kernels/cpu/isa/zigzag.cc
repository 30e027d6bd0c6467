// src/kernels/cpu/isa/zigzag.cc - kernels of the zigzag layouts; zigzag_kernel.h says how they work.
#include "kernels/cpu/isa/zigzag_codes.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/cpu/zigzag_kernel.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

constexpr int kQuads = int(kZigzagMostColumns / 4);  // groups of four columns in a chunk
constexpr float kLowUnit = 256;                      // steps in one unit of the high byte
/// Whether codes may come as they lie in their bytes: only where a dot product of four bytes does not saturate.
#if defined(__AVX512VNNI__)
constexpr bool kRaw = true;
#else
constexpr bool kRaw = false;
#endif

/// The chunk's factors of one superblock row, rounded: dwords of four columns' bytes.
template <class L>
struct Rounded {
  alignas(64) int32_t bytes[kQuads][2 * L::kBlocks];  // by place()
  alignas(64) float step[16];                         // of the first L::kBlocks
};

/// Where the dword of a block's high (plane 0) or low bytes (plane 1) lies: as two packings of 32-bit steps leave them.
constexpr int place(int block, int plane) { return 16 * (block / 8) + 4 * (block % 4) + 2 * plane + block / 4 % 2; }

/// In each 128-bit lane dwords[at[lane]].
template <int a0, int a1, int a2, int a3>
LACUNA_INLINE I32x16 spread_lanes(const int32_t* dwords) {
  I32x16 out;
#if defined(__AVX512BW__)
  const __m512i lanes = _mm512_setr_epi32(a0, a0, a0, a0, a1, a1, a1, a1, a2, a2, a2, a2, a3, a3, a3, a3);
  constexpr int kFirst = (a0 < a1 ? a0 : a1) < (a2 < a3 ? a2 : a3) ? (a0 < a1 ? a0 : a1) : (a2 < a3 ? a2 : a3);
  constexpr int kLast = (a0 > a1 ? a0 : a1) > (a2 > a3 ? a2 : a3) ? (a0 > a1 ? a0 : a1) : (a2 > a3 ? a2 : a3);
  if constexpr (kFirst / 16 == kLast / 16) {  // permutexvar looks at the low four bits of an index
    const __m512i all = _mm512_load_si512(dwords + 16 * (kFirst / 16));
    out.reg[0] = (RegI)_mm512_maskz_permutexvar_epi32(__mmask16(0xffff), lanes, all);
  } else {
    out.reg[0] = (RegI)_mm512_permutex2var_epi32(_mm512_load_si512(dwords), lanes, _mm512_load_si512(dwords + 16));
  }
#else
  constexpr int at[4] = {a0, a1, a2, a3};
  int32_t spread[16];
  for (int l = 0; l < 4; ++l)
    for (int i = 0; i < 4; ++i) spread[4 * l + i] = dwords[at[l]];
  __builtin_memcpy(&out, spread, 64);
#endif
  return out;
}

/// The block of outputs in a lane of a group.
template <class L>
constexpr int block_of(int group, int lane) {
  return L::out(group, lane) / (256 / L::kBlocks);
}

/// In each lane the dword of that lane's block of outputs.
template <class L, int kGroup, int kPlane>
LACUNA_INLINE I32x16 factors_of(const int32_t* dwords) {
  return spread_lanes<place(block_of<L>(kGroup, 0), kPlane), place(block_of<L>(kGroup, 1), kPlane),
                      place(block_of<L>(kGroup, 2), kPlane), place(block_of<L>(kGroup, 3), kPlane)>(dwords);
}

/// In each lane the step of that lane's block of outputs.
template <class L, int kGroup>
LACUNA_INLINE F32x16 steps_of(const float* step) {
  alignas(64) int32_t bits[16];
  __builtin_memcpy(bits, step, 64);
  const I32x16 lanes =
      spread_lanes<block_of<L>(kGroup, 0), block_of<L>(kGroup, 1), block_of<L>(kGroup, 2), block_of<L>(kGroup, 3)>(
          bits);
  F32x16 out;
  __builtin_memcpy(&out, &lanes, 64);
  return out;
}

/// Rounds a chunk's factors, [quads][4 blocks columns] floats, against the largest of each block.
template <class L>
LACUNA_INLINE void round_factors(const float* factor, int quads, Rounded<L>& out) {
  constexpr int kVectors = L::kBlocks / 4;  // of 4 blocks x 4 columns
  F32x16 inverse[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    // Magnitudes compare as integers; a NaN is the largest.
    RegU top[kRegs] = {};
    for (int q = 0; q < quads; ++q) {
      const U32x16 bits = load_u32(factor + q * 4 * L::kBlocks + 16 * v);
      for (int i = 0; i < kRegs; ++i) {
        const RegU magnitude = bits.reg[i] & (RegU)splat_reg(0x7fffffff);
#if defined(__AVX512BW__)
        top[i] = (RegU)_mm512_maskz_max_epu32(__mmask16(0xffff), (__m512i)top[i], (__m512i)magnitude);
#else
        const RegU larger = (RegU)((RegI)magnitude > (RegI)top[i]);
        top[i] = (magnitude & larger) | (top[i] & ~larger);
#endif
      }
    }
#if defined(__AVX512BW__)
    const auto of_block = [](__m512i m) {  // the largest of each four lanes, in all four
      m = _mm512_maskz_max_epu32(__mmask16(0xffff), m, _mm512_maskz_shuffle_epi32(__mmask16(0xffff), m, _MM_PERM_CDAB));
      return _mm512_maskz_max_epu32(__mmask16(0xffff), m,
                                    _mm512_maskz_shuffle_epi32(__mmask16(0xffff), m, _MM_PERM_BADC));
    };
    const __m512i bits = of_block((__m512i)top[0]);
    const __m512 magnitude = (__m512)bits, steps_ps = _mm512_set1_ps(kZigzagSteps);
    const __mmask16 bad = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(0x7f800000));
    const __mmask16 counts = _mm512_cmpge_epu32_mask(bits, (__m512i)_mm512_set1_ps(0x1p-110f)) & ~bad;
    __m512 step = _mm512_maskz_div_ps(counts, magnitude, steps_ps);
    step = _mm512_mask_mov_ps(step, bad, _mm512_set1_ps(__builtin_nanf("")));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(
        out.step + 4 * v,
        _mm512_maskz_extractf32x4_ps(__mmask8(0xf), _mm512_maskz_permutexvar_ps(__mmask16(0xffff), firsts, step), 0));
    inverse[v] = {{(RegF)_mm512_maskz_div_ps(counts, steps_ps, magnitude)}};
#else
    uint32_t lanes[16];
    __builtin_memcpy(lanes, top, 64);
    float scale[16];
    for (int b = 0; b < 4; ++b) {
      uint32_t largest = 0;
      for (int c = 0; c < 4; ++c) largest = lanes[4 * b + c] > largest ? lanes[4 * b + c] : largest;
      float magnitude;
      __builtin_memcpy(&magnitude, &largest, 4);
      float by = 0, step = 0;
      if (largest >= 0x7f800000u) {
        step = __builtin_nanf("");          // a NaN or an infinity shows in every output of the block
      } else if (magnitude >= 0x1p-110f) {  // smaller ones are below any weight's effect
        by = kZigzagSteps / magnitude;
        step = magnitude / kZigzagSteps;
      }
      out.step[4 * v + b] = step;
      for (int c = 0; c < 4; ++c) scale[4 * b + c] = by;
    }
    inverse[v] = load_f32(scale);
#endif
  }
  for (int q = 0; q < quads; ++q) {
    const float* from = factor + q * 4 * L::kBlocks;
    for (int v = 0; v < kVectors; v += 2) {
      const F32x16 first = load_f32(from + 16 * v) * inverse[v], second = load_f32(from + 16 * v + 16) * inverse[v + 1];
#if defined(__AVX512BW__)
      const __m512i steps =
          _mm512_maskz_packs_epi32(~__mmask32{0}, _mm512_maskz_cvtps_epi32(__mmask16(0xffff), (__m512)first.reg[0]),
                                   _mm512_maskz_cvtps_epi32(__mmask16(0xffff), (__m512)second.reg[0]));
      const auto shift = [](__m512i v16) { return _mm512_maskz_srai_epi16(~__mmask32{0}, v16, 8); };
      const __m512i high = shift(_mm512_maskz_add_epi16(~__mmask32{0}, steps, _mm512_set1_epi16(128)));
      const __m512i low = shift(_mm512_maskz_slli_epi16(~__mmask32{0}, steps, 8));
      _mm512_store_si512(out.bytes[q] + 8 * v, _mm512_maskz_packs_epi16(~__mmask64{0}, high, low));
#else
      for (int part = 0; part < 2; ++part) {
        const F32x16 rounded = (part == 0 ? first : second) + splat(0x1.8p23f);  // the integer is in the low bits
        int32_t steps[16];
        __builtin_memcpy(steps, &rounded, 64);
        int8_t low[16], high[16];
        for (int i = 0; i < 16; ++i) {
          const int32_t step = steps[i] - 0x4b400000;
          low[i] = int8_t(uint8_t(step & 255));
          high[i] = int8_t((step + 128) >> 8);
        }
        for (int b = 0; b < 4; ++b) {
          __builtin_memcpy(&out.bytes[q][place(4 * (v + part) + b, 0)], high + 4 * b, 4);
          __builtin_memcpy(&out.bytes[q][place(4 * (v + part) + b, 1)], low + 4 * b, 4);
        }
      }
#endif
    }
  }
}

/// Cache lines of the next chunk's columns, asked for a few at a time between the arithmetic: a burst would fill the
/// line buffers and stop the loads of this chunk.
struct Ahead {
  const uint8_t* column[kZigzagMostColumns];
  int count = 0;
  int64_t at = 0, end = 0;  // offsets of the lines still to ask for in each column
  inline __attribute__((always_inline)) void quad(int q, int64_t line) const {
    const int64_t offset = at + 64 * line;
    if (offset >= end || 4 * q >= count) return;
    for (int c = 4 * q; c < 4 * q + 4; ++c) __builtin_prefetch(column[c] + offset, 0, 2);
  }
};

/// Codes straight from the columns' bytes.
template <class L>
struct FromColumns {
  const uint8_t* const* p;
  template <int kPass>
  LACUNA_INLINE void get(const FromColumns& from, int q, U32x16 out[2][4]) {
    L::template codes<kPass, kRaw>(from.p + 4 * q, out);
  }
};
/// Codes that were unpacked before.
struct Unpacked {
  U32x16 codes[kQuads][2][2][4];
  template <int kPass>
  LACUNA_INLINE void get(const Unpacked& from, int q, U32x16 out[2][4]) {
    for (int g = 0; g < 2; ++g)
      for (int j = 0; j < 4; ++j) out[g][j] = from.codes[q][kPass][g][j];
  }
};

/// Half a superblock row of a chunk: two groups of 64 outputs. y: [256] in the kernel's order: vector 4 group + j.
template <class L, int kPass, class Codes>
LACUNA_INLINE void multiply(const Codes& from, int quads, const Rounded<L>& a, const Ahead& ahead, float* y) {
  I32x16 high[2][4], low[2][4];
  for (int g = 0; g < 2; ++g)
    for (int j = 0; j < 4; ++j) high[g][j] = low[g][j] = splat(int32_t{0});
  for (int q = 0; q < quads; ++q) {
    U32x16 codes[2][4];
    Codes::template get<kPass>(from, q, codes);
    ahead.quad(q, 1 + kPass);
    if constexpr (L::kBytes > 192) ahead.quad(q, 3 + kPass);
    const I32x16 high0 = factors_of<L, 2 * kPass, 0>(a.bytes[q]), high1 = factors_of<L, 2 * kPass + 1, 0>(a.bytes[q]);
    const I32x16 low0 = factors_of<L, 2 * kPass, 1>(a.bytes[q]), low1 = factors_of<L, 2 * kPass + 1, 1>(a.bytes[q]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < kRegs; ++i) {
        high[0][j].reg[i] = dot4_reg<L::kMaxCode>(high[0][j].reg[i], codes[0][j].reg[i], high0.reg[i]);
        high[1][j].reg[i] = dot4_reg<L::kMaxCode>(high[1][j].reg[i], codes[1][j].reg[i], high1.reg[i]);
        low[0][j].reg[i] = dot4_reg<L::kMaxCode>(low[0][j].reg[i], codes[0][j].reg[i], low0.reg[i]);
        low[1][j].reg[i] = dot4_reg<L::kMaxCode>(low[1][j].reg[i], codes[1][j].reg[i], low1.reg[i]);
      }
    }
  }
  F32x16 step[2] = {steps_of<L, 2 * kPass>(a.step), steps_of<L, 2 * kPass + 1>(a.step)};
  if constexpr (kRaw && L::kRawScale != 1) step[1] = step[1] * splat(1.0f / L::kRawScale);
  for (int g = 0; g < 2; ++g) {
    for (int j = 0; j < 4; ++j) {
      float* at = y + 16 * (4 * (2 * kPass + g) + j);
      // A chunk's high sums stay below 2^21, but times 256 they may pass 24 bits: both are added as floats.
      const F32x16 sum = mul_add(to_f32(high[g][j]), splat(kLowUnit), to_f32(low[g][j]));
      store_f32(at, mul_add(sum, step[g], load_f32(at)));
    }
  }
}

/// The columns of a chunk, where they are and which come next.
struct Chunk {
  const uint8_t* p[kZigzagMostColumns];
  Ahead ahead;
  int64_t columns = 0;
  int quads = 0;

  inline __attribute__((always_inline)) void take(const ZigzagArgs& a, int64_t first) {
    const auto* base = reinterpret_cast<const uint8_t*>(a.run.base);
    const int64_t left = a.count - first;
    columns = left < a.chunk ? left : a.chunk;
    quads = int((columns + 3) / 4);
    for (int c = 0; c < 4 * quads; ++c)  // the last group is filled up with the last column
      p[c] = base + int64_t{a.columns[first + (c < columns ? c : columns - 1)]} * a.run.stride;
    ahead.count = 0;
    if (a.prefetch && left > a.chunk) {
      const int64_t more = left - a.chunk < a.chunk ? left - a.chunk : a.chunk;
      ahead.count = int(more + 3) / 4 * 4;
      for (int c = 0; c < ahead.count; ++c)
        ahead.column[c] = base + int64_t{a.columns[first + a.chunk + (c < more ? c : more - 1)]} * a.run.stride;
    }
  }
  /// The inputs of these columns; zeros for what fills the last group up.
  inline __attribute__((always_inline)) void inputs(const float* from, float* x) const {
    for (int c = 0; c < 4 * quads; ++c) x[c] = c < columns ? from[c] : 0;
  }
  inline __attribute__((always_inline)) void row(int64_t r, int64_t bytes) {
    ahead.at = (r * bytes + 63) & ~int64_t{63};
    ahead.end = (r + 1) * bytes;
  }
  inline __attribute__((always_inline)) void next_row(int64_t bytes) {
    for (int c = 0; c < 4 * quads; ++c) p[c] += bytes;
  }
};

template <class L>
void accumulate_one(const ZigzagArgs& a) {
  Chunk chunk;
  alignas(64) float x[kZigzagMostColumns];
  alignas(64) float factor[kZigzagMostColumns * L::kBlocks];
  Rounded<L> rounded = {};
  for (int64_t first = 0; first < a.count; first += a.chunk) {
    chunk.take(a, first);
    chunk.inputs(a.x + first, x);
    for (int64_t r = 0; r < a.run.rows; ++r) {
      chunk.row(r, L::kBytes);
      for (int q = 0; q < chunk.quads; ++q) {
        factors4<L>(chunk.p + 4 * q, x + 4 * q, factor + q * 4 * L::kBlocks, a.mins + r * kZigzagMins);
        chunk.ahead.quad(q, 0);
      }
      round_factors<L>(factor, chunk.quads, rounded);
      multiply<L, 0>(FromColumns<L>{chunk.p}, chunk.quads, rounded, chunk.ahead, a.y + 256 * r);
      multiply<L, 1>(FromColumns<L>{chunk.p}, chunk.quads, rounded, chunk.ahead, a.y + 256 * r);
      chunk.next_row(L::kBytes);
    }
  }
}

/// Several tokens: scales and codes of a chunk are unpacked once.
template <class L>
void accumulate_few(const ZigzagArgs& a) {
  constexpr int kFloats = 4 * L::kBlocks;  // of four columns: [blocks, columns]
  Chunk chunk;
  Ahead none;
  alignas(64) float x[kZigzagMostColumns];
  alignas(64) float scale[kQuads * kFloats], min[kQuads * kFloats], factor[kQuads * kFloats];
  alignas(64) const float ones[4] = {1, 1, 1, 1};
  Rounded<L> rounded = {};
  Unpacked unpacked;
  for (int64_t first = 0; first < a.count; first += a.chunk) {
    chunk.take(a, first);
    for (int64_t r = 0; r < a.run.rows; ++r) {
      chunk.row(r, L::kBytes);
      for (int q = 0; q < chunk.quads; ++q) {
        __builtin_memset(min + q * kFloats, 0, sizeof(float) * kFloats);
        factors4<L>(chunk.p + 4 * q, ones, scale + q * kFloats, min + q * kFloats);
        L::template codes<0, kRaw>(chunk.p + 4 * q, unpacked.codes[q][0]);
        L::template codes<1, kRaw>(chunk.p + 4 * q, unpacked.codes[q][1]);
        for (int64_t line = 0; line < (L::kBytes + 63) / 64; ++line) chunk.ahead.quad(q, line);
      }
      for (int64_t t = 0; t < a.tokens; ++t) {
        chunk.inputs(a.x + t * a.x_step + first, x);
        float* mins = a.mins + t * a.mins_step + r * kZigzagMins;
        float* y = a.y + t * a.y_step + 256 * r;
        for (int v = 0; v < kFloats / 16; ++v) {
          F32x16 sum = load_f32(mins + 16 * v);
          for (int q = 0; q < chunk.quads; ++q) {
            const F32x16 inputs = repeat_four(x + 4 * q);
            const int at = q * kFloats + 16 * v;
            store_f32(factor + at, load_f32(scale + at) * inputs);
            sum = mul_add(load_f32(min + at), inputs, sum);
          }
          store_f32(mins + 16 * v, sum);
        }
        round_factors<L>(factor, chunk.quads, rounded);
        multiply<L, 0>(unpacked, chunk.quads, rounded, none, y);
        multiply<L, 1>(unpacked, chunk.quads, rounded, none, y);
      }
      chunk.next_row(L::kBytes);
    }
  }
}

template <class L>
void accumulate(const ZigzagArgs& a) {
  if (a.tokens == 1)
    accumulate_one<L>(a);
  else
    accumulate_few<L>(a);
}

template <class L>
void finish(const float* y, int64_t y_step, const float* mins, int64_t mins_step, int pieces, float* out) {
  constexpr int kWidth = 256 / L::kBlocks;
  float min[L::kBlocks];
  for (int b = 0; b < L::kBlocks; ++b) {
    float sum = 0;
    for (int piece = 0; piece < pieces; ++piece)
      for (int c = 0; c < 4; ++c) sum += mins[piece * mins_step + 4 * b + c];
    min[b] = sum;
  }
  for (int g = 0; g < 4; ++g) {
    for (int l = 0; l < 4; ++l) {
      float* to = out + L::out(g, l);
      const float off = min[L::out(g, l) / kWidth];
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 4; ++i) {
          float sum = 0;
          for (int piece = 0; piece < pieces; ++piece) sum += y[piece * y_step + 16 * (4 * g + j) + 4 * l + i];
          to[4 * j + i] = sum - off;
        }
      }
    }
  }
}

// ---- many tokens ----

/// Transposes 128-bit lanes: lane j of out[l] = lane l of in[j].
LACUNA_INLINE void transpose_lanes(const U32x16 in[4], U32x16 out[4]) {
#if defined(__AVX512BW__)
  const auto pick = []<int kOrder>(const __m512i& x, const __m512i& y) {
    return _mm512_maskz_shuffle_i32x4(__mmask16(0xffff), x, y, kOrder);
  };
  const auto reg = [&](int j) { return (__m512i)in[j].reg[0]; };
  const __m512i low01 = pick.template operator()<0x44>(reg(0), reg(1)),
                high01 = pick.template operator()<0xee>(reg(0), reg(1));
  const __m512i low23 = pick.template operator()<0x44>(reg(2), reg(3)),
                high23 = pick.template operator()<0xee>(reg(2), reg(3));
  out[0].reg[0] = (RegU)pick.template operator()<0x88>(low01, low23);
  out[1].reg[0] = (RegU)pick.template operator()<0xdd>(low01, low23);
  out[2].reg[0] = (RegU)pick.template operator()<0x88>(high01, high23);
  out[3].reg[0] = (RegU)pick.template operator()<0xdd>(high01, high23);
#else
  for (int l = 0; l < 4; ++l)
    for (int j = 0; j < 4; ++j)
      __builtin_memcpy(reinterpret_cast<char*>(&out[l]) + 16 * j, reinterpret_cast<const char*>(&in[j]) + 16 * l, 16);
#endif
}

#if !defined(__AVX512BW__)
/// Smallest f16 >= x for 0 <= x, so that codes never pass 127.
LACUNA_INLINE uint16_t half_not_below(float x) {
  if (!(x > 0)) return 0;
  if (x < 0x1p-14f) {  // subnormal: steps of 2^-24
    const float steps = x * 0x1p24f;
    auto whole = uint32_t(steps);
    if (float(whole) < steps) ++whole;
    return uint16_t(whole);
  }
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  bits += 0x1fff;  // 13 bits are dropped
  const uint32_t exponent = (bits >> 23) - 112;
  return exponent >= 31 ? 0x7c00 : uint16_t((exponent << 10) | ((bits >> 13) & 0x3ff));
}
#endif

/// Scales of 16 outputs whose largest magnitudes are `top`, rounded up to f16, and what to multiply with.
LACUNA_INLINE F32x16 put_scales(const F32x16& top, uint8_t* scales) {
#if defined(__AVX512BW__)
  const __m512 wanted = _mm512_mul_ps((__m512)top.reg[0], _mm512_set1_ps(1.0f / 127 * (1 + 0x1p-22f)));
  const __m256i halves = _mm512_maskz_cvtps_ph(__mmask16(0xffff), wanted, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales), halves);
  const __m512 unit = _mm512_maskz_cvtph_ps(__mmask16(0xffff), halves);
  const __mmask16 some = _mm512_cmp_ps_mask(unit, _mm512_setzero_ps(), _CMP_GT_OQ);
  return {{(RegF)_mm512_maskz_div_ps(some, _mm512_set1_ps(1), unit)}};
#else
  float largest[16], inverse[16];
  uint16_t scale[16];
  store_f32(largest, top);
  for (int i = 0; i < 16; ++i) {
    scale[i] = half_not_below(largest[i] / 127);
    const float unit = half_to_float(scale[i]);
    inverse[i] = unit > 0 ? 1 / unit : 0;
  }
  __builtin_memcpy(scales, scale, 32);
  return load_f32(inverse);
#endif
}

/// 16 outputs of one block of 32 columns. codes: of eight groups of four columns, `step` vectors apart; s, m: scale and
/// minimum of the outputs' block in each column.
LACUNA_INLINE void put_panel(const U32x16* codes, int step, const float* s, const float* m, uint8_t* out,
                             uint8_t* scales) {
  F32x16 w[32], top = splat(0.0f);
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    const U32x16 four = codes[q * step];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const int k = 4 * q + c;
      w[k] = mul_add(to_f32((four >> (8 * c)) & 255u), splat(s[k]), splat(-m[k]));
      for (int i = 0; i < kRegs; ++i) {
        const RegF magnitude = (RegF)((RegU)w[k].reg[i] & (RegU)splat_reg(0x7fffffff));
        top.reg[i] = magnitude > top.reg[i] ? magnitude : top.reg[i];
      }
    }
  }
  const F32x16 by = put_scales(top, scales);
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    U32x16 packed = {};
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      // 128.0 + code as the low byte of the sum's bits
      const F32x16 rounded = mul_add(w[4 * q + c], by, splat(0x1.8p23f + 128));
      U32x16 bits;
      __builtin_memcpy(&bits, &rounded, 64);
      packed = packed | ((bits & 255u) << (8 * c));
    }
    __builtin_memcpy(out + 64 * q, &packed, 64);
  }
}

/// Panels of 16 outputs as linear_panels.cc lays out q8_0: [K/32][512] codes + 128, then [K/32][16] f16 scales.
template <class L>
void to_panels(const ZigzagRun& run, int64_t r, int64_t K, std::byte* panels) {
  constexpr int kWidth = 256 / L::kBlocks, kFloats = 4 * L::kBlocks;
  const int64_t blocks = (K + 31) / 32, panel = odd_lines(blocks * (512 + 32));
  alignas(64) static const uint8_t kZeros[512] = {};
  alignas(64) static const float kOnes[4] = {1, 1, 1, 1};
  for (int64_t block = 0; block < blocks; ++block) {
    const uint8_t* p[32];
    for (int c = 0; c < 32; ++c) {
      const int64_t k = block * 32 + c;
      p[c] = k < K ? reinterpret_cast<const uint8_t*>(run.base) + k * run.stride + r * L::kBytes : kZeros;
    }
    alignas(64) float s[L::kBlocks][32], m[L::kBlocks][32];
    for (int q = 0; q < 8; ++q) {
      alignas(64) float scale[kFloats], min[kFloats] = {};  // [blocks, columns]
      factors4<L>(p + 4 * q, kOnes, scale, min);
      for (int b = 0; b < L::kBlocks; ++b) {
        __builtin_memcpy(&s[b][4 * q], scale + 4 * b, 16);
        __builtin_memcpy(&m[b][4 * q], min + 4 * b, 16);
      }
    }
    const auto groups = [&]<int kPass>() {
      U32x16 codes[8][2][4];  // [groups of columns][groups of outputs][lanes]
      for (int q = 0; q < 8; ++q) {
        U32x16 vectors[2][4];
        L::template codes<kPass, false>(p + 4 * q, vectors);
        for (int g = 0; g < 2; ++g) transpose_lanes(vectors[g], codes[q][g]);
      }
      for (int g = 0; g < 2; ++g) {
        for (int l = 0; l < 4; ++l) {
          const int output = L::out(2 * kPass + g, l), b = output / kWidth;
          auto* at = reinterpret_cast<uint8_t*>(panels + output / 16 * panel);
          put_panel(&codes[0][g][l], 8, s[b], m[b], at + block * 512, at + blocks * 512 + block * 32);
        }
      }
    };
    groups.template operator()<0>();
    groups.template operator()<1>();
  }
}

template <class L>
constexpr ZigzagKernel row(const char* name) {
  return {L::kId, name, L::kBytes, accumulate<L>, finish<L>, to_panels<L>};
}
constexpr ZigzagKernel kKernels[] = {row<Zz4K>("zigzag_zz4_k"), row<Zz6K>("zigzag_zz6_k"), row<Zz5K>("zigzag_zz5_k"),
                                     row<Zz8>("zigzag_zz8"),    row<Zz3K>("zigzag_zz3_k"), row<Zz2K>("zigzag_zz2_k")};
constexpr ZigzagTable kTable = {kKernels, int(sizeof(kKernels) / sizeof(kKernels[0]))};

}  // namespace

const ZigzagTable& zigzag_table() { return kTable; }

}  // namespace lacuna::cpu::LACUNA_ISA
