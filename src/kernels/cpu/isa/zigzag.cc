// src/kernels/cpu/isa/zigzag.cc - kernels of the zigzag layouts; zigzag_kernel.h says how they work.
#include <type_traits>

#include "kernels/cpu/isa/zigzag_panels.h"
#include "kernels/cpu/isa/zigzag_round.h"
#include "kernels/cpu/zigzag_kernel.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

/// Cache lines of superblocks to come, asked for a few at a time between the arithmetic: a burst would fill the line
/// buffers and stop the loads of this superblock.
struct Ahead {
  const uint8_t* const* column = nullptr;
  int count = 0;            // of columns, whole groups of four
  int64_t at = 0, end = 0;  // offsets of the lines in each column
  inline __attribute__((always_inline)) void quad(int q, int64_t line) const {
    const int64_t offset = at + 64 * line;
    if (offset >= end || 4 * q >= count) return;
    for (int c = 4 * q; c < 4 * q + 4; ++c) __builtin_prefetch(column[c] + offset, 0, 2);
  }
};

// Where a dot product of four bytes is one instruction and registers are many, codes go straight into it, as they lie
// in their bytes.
#if defined(__AVX512VNNI__)
constexpr bool kRaw = true;
#else
constexpr bool kRaw = false;
#endif

/// Codes that were unpacked before.
struct Unpacked {
  U32x16 codes[kQuads][2][2][4];  // [groups of columns][passes][groups of outputs][vectors]
  template <int kPass>
  LACUNA_INLINE void get(const Unpacked& from, int q, U32x16 out[2][4]) {
    for (int g = 0; g < 2; ++g)
      for (int j = 0; j < 4; ++j) out[g][j] = from.codes[q][kPass][g][j];
  }
};

#if defined(__AVX512VNNI__)

/// Codes straight from the columns' bytes.
template <class L>
struct FromColumns {
  const uint8_t* const* p;
  template <int kPass>
  LACUNA_INLINE void get(const FromColumns& from, int q, U32x16 out[2][4]) {
    L::template codes<kPass, kRaw>(from.p + 4 * q, out);
  }
};
/// Half a superblock row of a chunk: two groups of 64 outputs. y: [256] in the kernel's order: vector 4 group + j.
template <class L, class Places, int kPass, class Codes>
LACUNA_INLINE void multiply(const Codes& from, int quads, const Rounded<L>& a, const Ahead& ahead, float* y) {
  I32x16 high[2][4], low[2][4];
  for (int g = 0; g < 2; ++g)
    for (int j = 0; j < 4; ++j) high[g][j] = low[g][j] = splat(int32_t{0});
  for (int q = 0; q < quads; ++q) {
    U32x16 codes[2][4];
    Codes::template get<kPass>(from, q, codes);
    ahead.quad(q, 1 + kPass);
    if constexpr (L::kBytes > 192) ahead.quad(q, 3 + kPass);
    const int32_t* bytes = a.bytes[q];
    const I32x16 high0 = factors_of<L, Places, 2 * kPass, 0>(bytes);
    const I32x16 high1 = factors_of<L, Places, 2 * kPass + 1, 0>(bytes);
    const I32x16 low0 = factors_of<L, Places, 2 * kPass, 1>(bytes);
    const I32x16 low1 = factors_of<L, Places, 2 * kPass + 1, 1>(bytes);
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

template <class L>
LACUNA_INLINE void multiply_all(const Unpacked& from, int quads, const Rounded<L>& a, float* y) {
  multiply<L, PackedPlaces, 0>(from, quads, a, Ahead{}, y);
  multiply<L, PackedPlaces, 1>(from, quads, a, Ahead{}, y);
}

#else

/// sums[plane] += the dot products of `quads` vectors of codes, `step` vectors apart, with their factors.
template <int kMaxCode>
LACUNA_INLINE void dot_chunk(const U32x16* codes, int step, const I32x16 (*factors)[2], int quads, I32x16* sums) {
#if defined(__AVX2__)
  if constexpr (kMaxCode <= 127) {
    // Sums of two products in 16 bits hold so many groups of columns.
    constexpr int kSafe = 32767 / (2 * 128 * kMaxCode);
    for (int first = 0; first < quads; first += kSafe) {
      const int last = quads < first + kSafe ? quads : first + kSafe;
      RegH pairs[2][kRegs] = {};
      for (int q = first; q < last; ++q)
        for (int plane = 0; plane < 2; ++plane)
          for (int i = 0; i < kRegs; ++i)
            pairs[plane][i] += multiply_pairs(codes[q * step].reg[i], factors[q][plane].reg[i]);
      for (int plane = 0; plane < 2; ++plane)
        for (int i = 0; i < kRegs; ++i) sums[plane].reg[i] += add_pairs(pairs[plane][i]);
    }
    return;
  }
#endif
  for (int q = 0; q < quads; ++q)
    for (int plane = 0; plane < 2; ++plane)
      for (int i = 0; i < kRegs; ++i)
        sums[plane].reg[i] = dot4_reg<kMaxCode>(sums[plane].reg[i], codes[q * step].reg[i], factors[q][plane].reg[i]);
}

/// What multiply does where registers are few or a dot product takes several instructions: one vector of codes at a
/// time, its sums stay in registers.
template <class L, int kGroup>
LACUNA_INLINE void multiply_group(const Unpacked& from, int quads, const Rounded<L>& a, float* y) {
  I32x16 factors[kQuads][2];  // planes
  for (int q = 0; q < quads; ++q) {
    factors[q][0] = factors_of<L, PackedPlaces, kGroup, 0>(a.bytes[q]);
    factors[q][1] = factors_of<L, PackedPlaces, kGroup, 1>(a.bytes[q]);
  }
  const F32x16 step = steps_of<L, kGroup>(a.step);
  for (int j = 0; j < 4; ++j) {
    I32x16 sums[2] = {splat(int32_t{0}), splat(int32_t{0})};
    dot_chunk<L::kMaxCode>(&from.codes[0][kGroup / 2][kGroup % 2][j], 16, factors, quads, sums);
    float* at = y + 16 * (4 * kGroup + j);
    const F32x16 sum = mul_add(to_f32(sums[0]), splat(kLowUnit), to_f32(sums[1]));
    store_f32(at, mul_add(sum, step, load_f32(at)));
  }
}
template <class L>
LACUNA_INLINE void multiply_all(const Unpacked& from, int quads, const Rounded<L>& a, float* y) {
  multiply_group<L, 0>(from, quads, a, y);
  multiply_group<L, 1>(from, quads, a, y);
  multiply_group<L, 2>(from, quads, a, y);
  multiply_group<L, 3>(from, quads, a, y);
}

#endif

/// The columns of a chunk, where they are and which come next.
struct Chunk {
  const uint8_t* p[kZigzagMostColumns] = {};  // this superblock of each
  Ahead ahead;
  int64_t columns = 0;
  int quads = 0;
  const uint8_t* first[kZigzagMostColumns];  // superblocks of this chunk's columns
  const uint8_t* next[kZigzagMostColumns];   // of the next one's
  int next_columns = 0;                      // whole groups of four
  int64_t rows = 0, distance = 0;

  inline __attribute__((always_inline)) void take(const ZigzagArgs& a, int64_t at) {
    const auto* base = reinterpret_cast<const uint8_t*>(a.run.base);
    const int64_t left = a.count - at;
    columns = left < a.chunk ? left : a.chunk;
    quads = int((columns + 3) / 4);
    for (int c = 0; c < 4 * quads; ++c)  // the last group is filled up with the last column
      p[c] = first[c] = base + int64_t{a.columns[at + (c < columns ? c : columns - 1)]} * a.run.stride;
    rows = a.run.rows;
    distance = a.prefetch < rows ? a.prefetch : rows;
    next_columns = 0;
    if (distance > 0 && left > a.chunk) {
      const int64_t more = left - a.chunk < a.chunk ? left - a.chunk : a.chunk;
      next_columns = int(more + 3) / 4 * 4;
      for (int c = 0; c < next_columns; ++c)
        next[c] = base + int64_t{a.columns[at + a.chunk + (c < more ? c : more - 1)]} * a.run.stride;
    }
  }
  /// The inputs of these columns; zeros for what fills the last group up.
  inline __attribute__((always_inline)) void inputs(const float* from, float* x) const {
    for (int c = 0; c < 4 * quads; ++c) x[c] = c < columns ? from[c] : 0;
  }
  inline __attribute__((always_inline)) void row(int64_t r, int64_t bytes) {
    int64_t to = r + distance;
    const bool same = to < rows;
    if (!same) to -= rows;
    ahead.column = same ? first : next;
    ahead.count = distance == 0 ? 0 : same ? 4 * quads : next_columns;
    ahead.at = (to * bytes + 63) & ~int64_t{63};
    ahead.end = (to + 1) * bytes;
  }
  inline __attribute__((always_inline)) void next_row(int64_t bytes) {
    for (int c = 0; c < 4 * quads; ++c) p[c] += bytes;
  }
};

#if defined(__AVX512VNNI__)

/// How a superblock row's factors come from its columns' headers, four columns at a time, and the inputs.
template <class L>
struct FloatFactors {
  using Places = PackedPlaces;
  alignas(64) float factor[kZigzagMostColumns * L::kBlocks];
  inline __attribute__((always_inline)) void unpack(const uint8_t* const p[4], const float* x, int q, float* mins) {
    factors4<L>(p, x, factor + q * 4 * L::kBlocks, mins);
  }
  inline __attribute__((always_inline)) void factors(const float*, int quads, Rounded<L>& out, float*) const {
    round_factors<L>(factor, quads, out);
  }
};
template <class L>
struct IntegerFactors {
  using Places = OrderedPlaces;
  SixBitRow row;
  inline __attribute__((always_inline)) void unpack(const uint8_t* const p[4], const float*, int q, float*) {
    row.unpack(p, q);
  }
  inline __attribute__((always_inline)) void factors(const float* x, int quads, Rounded<L>& out, float* mins) {
    row.round_inputs(x, quads);
    row.factors(quads, out, mins);
  }
};

template <class L>
void accumulate_one(const ZigzagArgs& a) {
  Chunk chunk;
  alignas(64) float x[kZigzagMostColumns];
  std::conditional_t<L::kSixBit, IntegerFactors<L>, FloatFactors<L>> numbers;
  using Places = typename decltype(numbers)::Places;
  Rounded<L> rounded = {};
  for (int64_t first = 0; first < a.count; first += a.chunk) {
    chunk.take(a, first);
    chunk.inputs(a.x + first, x);
    for (int64_t r = 0; r < a.run.rows; ++r) {
      chunk.row(r, L::kBytes);
      float* mins = a.mins + r * kZigzagMins;
      for (int q = 0; q < chunk.quads; ++q) {
        numbers.unpack(chunk.p + 4 * q, x + 4 * q, q, mins);
        chunk.ahead.quad(q, 0);
      }
      numbers.factors(x, chunk.quads, rounded, mins);
      const FromColumns<L> codes{chunk.p};
      multiply<L, Places, 0>(codes, chunk.quads, rounded, chunk.ahead, a.y + 256 * r);
      multiply<L, Places, 1>(codes, chunk.quads, rounded, chunk.ahead, a.y + 256 * r);
      chunk.next_row(L::kBytes);
    }
  }
}

#endif

/// Any number of tokens: scales and codes of a chunk are unpacked once.
template <class L>
void accumulate_few(const ZigzagArgs& a) {
  constexpr int kFloats = 4 * L::kBlocks;  // of four columns: [blocks, columns]
  Chunk chunk;
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
        multiply_all<L>(unpacked, chunk.quads, rounded, y);
      }
      chunk.next_row(L::kBytes);
    }
  }
}

template <class L>
void accumulate(const ZigzagArgs& a) {
#if defined(__AVX512VNNI__)
  if (a.tokens == 1) {
    accumulate_one<L>(a);
    return;
  }
#endif
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
