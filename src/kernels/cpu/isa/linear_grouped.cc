// src/kernels/cpu/isa/linear_grouped.cc - the gq, bm and nm24_q4 layouts on panels of 16 rows (grouped_panels.h).
//
// weight = scale * (code - zero), so that a group's share of a sum is scale * (sum(code * x) - zero * sum(x)). Codes
// are unsigned bytes, x int8 with one scale per 32 inputs. gq: the zero's part is taken off in float. Masked: in
// integers, which is exact, so that dropped weights, whose code is the zero, add exactly nothing.
#include "kernels/cpu/grouped_panels.h"
#include "kernels/cpu/isa/linear_panel.h"
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

#if defined(__AVX512BW__)
constexpr int64_t kStepPrefetch = 6144;  // bytes ahead, from the beginning of a step whose successor is being unpacked
#else
constexpr int64_t kStepPrefetch = 4096;
#endif

/// Lane by lane a * b; a in 0..255, |b| < 2^15.
LACUNA_INLINE I32x16 multiply_small(const U32x16& a, int32_t b) {
  I32x16 out;
  for (int i = 0; i < kRegs; ++i) {
#if defined(__AVX512BW__)
    out.reg[i] = (RegI)_mm512_madd_epi16((__m512i)a.reg[i], (__m512i)splat_reg(b));
#elif defined(__AVX2__)
    out.reg[i] = (RegI)_mm256_madd_epi16((__m256i)a.reg[i], (__m256i)splat_reg(b));
#elif defined(__SSE2__)
    out.reg[i] = (RegI)_mm_madd_epi16((__m128i)a.reg[i], (__m128i)splat_reg(b));
#else
    out.reg[i] = (RegI)a.reg[i] * splat_reg(b);
#endif
  }
  return out;
}

LACUNA_INLINE I32x16 operator+(const I32x16& a, const I32x16& b) {
  I32x16 out;
  for (int i = 0; i < kRegs; ++i) out.reg[i] = a.reg[i] + b.reg[i];
  return out;
}

/// A byte for each of 16 rows, four times each: what dropped weights become.
struct Fill {
#if defined(__AVX512VBMI2__)
  __m512i bytes;
#else
  uint64_t words[8];
#endif
};

LACUNA_INLINE Fill make_fill(const uint8_t* zero) {
  Fill out;
#if defined(__AVX512VBMI2__)
  const __m512i rows = _mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), _mm_loadu_si128((const __m128i*)zero));
  out.bytes = _mm512_mullo_epi32(rows, _mm512_set1_epi32(0x01010101));
#else
  for (int i = 0; i < 8; ++i)
    out.words[i] = zero[2 * i] * uint64_t{0x01010101} | (zero[2 * i + 1] * uint64_t{0x01010101}) << 32;
#endif
  return out;
}

#if !defined(__AVX512VBMI2__)
/// The low codes at the places of a mask of 8, `fill` at the others.
LACUNA_INLINE uint64_t spread(uint64_t codes, uint32_t mask, uint64_t fill) {
#if defined(__BMI2__)
  const uint64_t places = _pdep_u64(mask, 0x0101010101010101u) * 255;
  return _pdep_u64(codes, places) | (fill & ~places);
#else
  for (; mask != 0; mask &= mask - 1, codes >>= 8) {
    const int shift = 8 * __builtin_ctz(mask);
    fill = (fill & ~(uint64_t{255} << shift)) | (codes & 255) << shift;
  }
  return fill;
#endif
}
#endif

/// 64 bytes: the next codes where the mask has ones, `fill` elsewhere.
LACUNA_INLINE U32x16 expand(const uint8_t*& next, uint64_t mask, const Fill& fill) {
  U32x16 out;
#if defined(__AVX512VBMI2__)
  const uint8_t* from = next;
  next += __builtin_popcountll(mask);
  out.reg[0] = (RegU)_mm512_mask_expand_epi8(fill.bytes, mask, _mm512_loadu_si512(from));
#else
  uint64_t words[8];
  for (int i = 0; i < 8; ++i) {
    const auto eight = uint32_t(mask >> (8 * i)) & 255;
    uint64_t codes;
    __builtin_memcpy(&codes, next, 8);
    words[i] = spread(codes, eight, fill.words[i]);
    next += __builtin_popcount(eight);
  }
  const auto word = [&](int i) { return static_cast<long long>(words[i]); };
#if defined(__AVX512BW__)
  out.reg[0] = (RegU)_mm512_set_epi64(word(7), word(6), word(5), word(4), word(3), word(2), word(1), word(0));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    out.reg[i] = (RegU)_mm256_set_epi64x(word(4 * i + 3), word(4 * i + 2), word(4 * i + 1), word(4 * i));
#else
  (void)word;
  __builtin_memcpy(&out, words, sizeof(words));
#endif
#endif
  return out;
}

/// Writes 64 bytes: bits [shift, shift + width) of each byte.
LACUNA_INLINE U32x16 field(const U32x16& bytes, int shift, int width) {
  return (bytes >> shift) & (0x01010101u * ((1u << width) - 1));
}

/// Unpacks chunks [0, count) to bytes.
template <int kBits>
LACUNA_INLINE void unpack(const uint8_t* from, int64_t count, uint8_t* out) {
  for (const uint8_t* end = from + count * chunk_bytes(kBits); from < end; from += chunk_bytes(kBits)) {
    if constexpr (kBits == 3) {
      const U32x16 high = load_u32(from + 128);
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q, out += 64) {
        const U32x16 low = load_u32(from + 64 * (q / 4));
        store_u32(out, field(low, 2 * (q % 4), 2) | (field(high, q, 1) << 2));
      }
    } else {
      const U32x16 bytes = load_u32(from);
#pragma GCC unroll 4
      for (int q = 0; q < 8 / kBits; ++q, out += 64) store_u32(out, field(bytes, kBits * q, kBits));
    }
  }
}

/// gq: codes in planes.
template <int kBits>
struct Dense {
  static constexpr int kMaxCode = (1 << kBits) - 1;
  static constexpr bool kMin = true;
  static constexpr int64_t kGroup = 0;  // as the parameters say
  class Panel {
   public:
    __attribute__((always_inline)) void open(const LinearArgs& a, int64_t n, int64_t group) {
      codes_ = reinterpret_cast<const uint8_t*>(a.weight) + n / kPanelRows * dense_panel_bytes(kBits, a.K, group);
      scales_ = codes_ + a.K / kBlock * 64 * kBits;
      far_ = a.far;
    }
    __attribute__((always_inline)) void begin_group(int64_t g) {
      scale = load_f16(scales_ + g * kGroupBytes);
      min = scale * load_f16(scales_ + g * kGroupBytes + 32) * splat(-1.0f);
    }
    __attribute__((always_inline)) void begin_block(int64_t b) {
      block_ = codes_ + b * 64 * kBits;
      ask_ahead(block_, kPrefetch, 64 * kBits, far_);
    }
    __attribute__((always_inline)) U32x16 load(int j) {
      if constexpr (kBits == 3)
        return load_codes<2, 1>(block_, j);
      else
        return load_codes<kBits, 0>(block_, j);
    }
    __attribute__((always_inline)) I32x16 start(const int32_t*) const { return splat(int32_t{0}); }
    F32x16 scale, min;

   private:
    const uint8_t *codes_, *scales_, *block_;
    bool far_;
  };
};

/// Where things lie in a masked panel.
template <int kBits>
class MaskedPanel {
 public:
  MaskedPanel() = default;
  __attribute__((always_inline)) MaskedPanel(const LinearArgs& a, int64_t n) : K_(a.K), steps_(count_steps(a.K)) {
    uint64_t at;
    __builtin_memcpy(&at, a.weight + n / kPanelRows * 8, 8);
    panel_ = reinterpret_cast<const uint8_t*>(a.weight) + at;
  }
  /// Chunks of a quarter of every step, or more.
  __attribute__((always_inline)) int64_t quarter_chunks() const { return word(steps_ + 1); }
  __attribute__((always_inline)) const uint8_t* group_at(int64_t g) const {
    return panel_ + scales_at(K_) + g * kGroupBytes;
  }
  __attribute__((always_inline)) const uint8_t* step_at(int64_t step) const { return panel_ + 64 * word(step); }
  /// Codes of a step. Past the last: somewhere inside the panel; they are unpacked for nothing.
  __attribute__((always_inline)) const uint8_t* codes_at(int64_t step) const {
    if (step >= steps_) return panel_;
    const int64_t cols = K_ - step * kStepCols;
    return step_at(step) + 2 * (cols < kStepCols ? cols : kStepCols);
  }

 private:
  __attribute__((always_inline)) int64_t word(int64_t i) const {
    uint32_t word;
    __builtin_memcpy(&word, panel_ + 4 * i, 4);
    return word;
  }
  const uint8_t* panel_ = nullptr;
  int64_t K_ = 0, steps_ = 0;
};

/// bm, nm24_q4: codes under a mask.
template <int kBits, int64_t kGroupCols>
struct Masked {
  static constexpr int kCodeBits = kBits, kMaxCode = (1 << kBits) - 1;
  static constexpr bool kMin = false;
  static constexpr int64_t kGroup = kGroupCols;
  /// Codes of a step in whole chunks, and what an expansion may read past them; two lie half a page apart, since a load
  /// waits for an older store whose address has the same low 12 bits.
  static constexpr int64_t kStepBytes = kBits == 8 ? 64 : 4096 + 2048;
  static_assert(kBits == 8 || kStepBytes >= most_chunks(kBits) * chunk_codes(kBits) + 64);

  /// For many tokens: each step is unpacked when it begins.
  class Panel {
   public:
    __attribute__((always_inline)) void open(const LinearArgs& a, int64_t n, int64_t) {
      panel_ = MaskedPanel<kBits>(a, n);
    }
    __attribute__((always_inline)) void begin_group(int64_t g) {
      scale = load_f16(panel_.group_at(g));
      zero_ = load_u8(panel_.group_at(g) + 32);
      fill_ = make_fill(panel_.group_at(g) + 32);
    }
    __attribute__((always_inline)) void begin_block(int64_t b) {
      constexpr int64_t kBlocks = kStepCols / kBlock;
      if (b % kBlocks == 0) {
        const uint8_t* codes = panel_.codes_at(b / kBlocks);
        masks_ = panel_.step_at(b / kBlocks);
        next_ = kBits == 8 ? codes : unpacked_;
        if (kBits < 8) unpack<kBits>(codes, kQuarters * panel_.quarter_chunks(), unpacked_);
      }
      block_ = masks_ + b % kBlocks * 64;
    }
    __attribute__((always_inline)) U32x16 load(int j) {
      uint64_t mask;
      __builtin_memcpy(&mask, block_ + 8 * j, 8);
      return expand(next_, mask, fill_);
    }
    __attribute__((always_inline)) I32x16 start(const int32_t* minus_sum) const {
      return multiply_small(zero_, *minus_sum);
    }
    F32x16 scale, min;

   private:
    MaskedPanel<kBits> panel_;
    const uint8_t *masks_ = nullptr, *block_, *next_ = nullptr;
    U32x16 zero_;
    Fill fill_;
    alignas(64) uint8_t unpacked_[kStepBytes];
  };
};

template <class C>
LACUNA_INLINE int64_t group_of(const LinearArgs& a) {
  if (C::kGroup > 0) return C::kGroup;
  const int64_t group = a.view->params.group_size;
  return group <= 0 || group > a.K ? a.K : group;
}

/// One token in two planes, one dense panel at a time.
template <class C>
void run_one_dense(const LinearArgs& a) {
  const int64_t group = group_of<C>(a), blocks = a.K / kBlock;
  for (int64_t n = a.row0; n < a.row1; n += kPanelRows) {
    typename C::Panel panel;
    panel.open(a, n, group);
    F32x16 sum = splat(0.0f);
    for (int64_t b = 0, g = 0; b < blocks; ++g) {
      panel.begin_group(g);
      const int64_t rest = blocks - b, of_group = group / kBlock, end = b + (of_group < rest ? of_group : rest);
      F32x16 part = splat(0.0f);
      float inputs = 0;
      for (; b < end; ++b) {
        panel.begin_block(b);
        const int8_t* x = a.x.codes + 2 * b * kBlock;
        // Two sums a plane, since a dot product takes longer than it blocks its unit.
        I32x16 coarse[2] = {splat(int32_t{0}), splat(int32_t{0})};
        I32x16 fine[2] = {splat(int32_t{0}), splat(int32_t{0})};
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          const U32x16 four = panel.load(j);
          coarse[j % 2] = dot4<C::kMaxCode>(coarse[j % 2], four, splat4(x + 4 * j));
          fine[j % 2] = dot4<C::kMaxCode>(fine[j % 2], four, splat4(x + kBlock + 4 * j));
        }
        const F32x16 both = mul_add(to_f32(fine[0] + fine[1]), splat(1 / kPlaneRatio), to_f32(coarse[0] + coarse[1]));
        part = mul_add(both, splat(a.x.scale[2 * b]), part);
        inputs += a.x.sum[2 * b];
      }
      sum = mul_add(part, panel.scale, sum);
      sum = mul_add(panel.min, splat(inputs), sum);
    }
    store_rows(a, n, 0, sum);
  }
}

/// The same for masked panels, whose decoding is most of the work: what changes from vector to vector is in registers.
template <class C>
void run_one_masked(const LinearArgs& a) {
  constexpr int kBits = C::kCodeBits;
  constexpr int64_t kQuarterCols = kStepCols / kQuarters, kBlocks = kQuarterCols / kBlock;
  constexpr int64_t kStepBytes = C::kStepBytes;
  const int64_t group = group_of<C>(a), steps = count_steps(a.K);
  alignas(64) uint8_t unpacked[2][kStepBytes];
  for (int64_t n = a.row0; n < a.row1; n += kPanelRows) {
    const MaskedPanel<kBits> panel(a, n);
    const int64_t chunks = panel.quarter_chunks();
    const int64_t lines = chunks * (chunk_bytes(kBits) / 64) + kQuarterCols / kBlock;
    if (kBits < 8) unpack<kBits>(panel.codes_at(0), kQuarters * chunks, unpacked[0]);
    F32x16 sum = splat(0.0f), part = sum, scale = sum;
    U32x16 zero = {};
    Fill fill = {};
    const int32_t* minus_sum = a.x.start;
    const float* x_scale = a.x.scale;
    const int8_t* x = a.x.codes;
    int64_t left = 0, g = 0;  // blocks of the group that are to come
    for (int64_t step = 0; step < steps; ++step) {
      const uint8_t* masks = panel.step_at(step);
      const uint8_t* next = kBits == 8 ? panel.codes_at(step) : unpacked[step % 2];
      const uint8_t* codes = panel.codes_at(step + 1);  // of the next step
      uint8_t* to = unpacked[(step + 1) % 2];
      const uint8_t* ahead = masks;
      const int64_t cols = a.K - step * kStepCols;
      for (int64_t k = 0; k < (cols < kStepCols ? cols : kStepCols); k += kQuarterCols) {
        // Always as many lines as the largest step has: a loop whose length changes would be mispredicted.
        ask_ahead(ahead, kStepPrefetch, 64 * lines, a.far);
        ahead += 64 * lines;
        // A part of the next step's codes, so that they have left for the cache before they are read.
        if (kBits < 8) unpack<kBits>(codes, chunks, to);
        codes += chunks * chunk_bytes(kBits);
        to += chunks * chunk_codes(kBits);
        for (int64_t b = 0; b < kBlocks && k + b * kBlock < cols; ++b) {
          if (left == 0) {
            sum = mul_add(part, scale, sum);
            part = splat(0.0f);
            scale = load_f16(panel.group_at(g));
            zero = load_u8(panel.group_at(g) + 32);
            fill = make_fill(panel.group_at(g) + 32);
            left = group / kBlock;
            ++g;
          }
          --left;
          I32x16 coarse = multiply_small(zero, minus_sum[0]), fine = multiply_small(zero, minus_sum[1]);
#pragma GCC unroll 8
          for (int j = 0; j < 8; ++j) {
            uint64_t mask;
            __builtin_memcpy(&mask, masks + 8 * j, 8);
            const U32x16 four = expand(next, mask, fill);
            coarse = dot4<C::kMaxCode>(coarse, four, splat4(x + 4 * j));
            fine = dot4<C::kMaxCode>(fine, four, splat4(x + kBlock + 4 * j));
          }
          const F32x16 both = mul_add(to_f32(fine), splat(1 / kPlaneRatio), to_f32(coarse));
          part = mul_add(both, splat(*x_scale), part);
          masks += 64;
          x += 2 * kBlock;
          minus_sum += 2;
          x_scale += 2;
        }
      }
    }
    store_rows(a, n, 0, mul_add(part, scale, sum));
  }
}

/// Many tokens on P neighbouring panels: the codes of 32 inputs stay in registers for all tokens.
template <class C, int P>
void run_panels(const LinearArgs& a, int64_t n) {
  const int64_t group = group_of<C>(a), blocks = a.K / kBlock, tokens = a.x.tokens;
  typename C::Panel panel[P];
  for (int p = 0; p < P; ++p) panel[p].open(a, n + p * kPanelRows, group);
  alignas(64) float sums[kMaxTile][16 * P];
  __builtin_memset(sums, 0, size_t(tokens) * sizeof(sums[0]));
  for (int64_t b = 0, g = 0; b < blocks; ++g) {
    for (int p = 0; p < P; ++p) panel[p].begin_group(g);
    const int64_t rest = blocks - b, of_group = group / kBlock, end = b + (of_group < rest ? of_group : rest);
    for (; b < end; ++b) {
      U32x16 codes[P][8];
      for (int p = 0; p < P; ++p) {
        panel[p].begin_block(b);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) codes[p][j] = panel[p].load(j);
      }
      const int8_t* x = a.x.codes + b * tokens * kBlock;
      const float* x_scale = a.x.scale + b * tokens;
      const int32_t* start = a.x.start + b * tokens;
      const float* x_sum = a.x.sum + b * tokens;
      for (int64_t t = 0; t < tokens; ++t, x += kBlock) {
        I32x16 acc[P];
        for (int p = 0; p < P; ++p) acc[p] = panel[p].start(start + t);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          const RegI four = splat4(x + 4 * j);
          for (int p = 0; p < P; ++p) acc[p] = dot4<C::kMaxCode>(acc[p], codes[p][j], four);
        }
        for (int p = 0; p < P; ++p) {
          F32x16 sum = load_f32(&sums[t][16 * p]);
          if constexpr (C::kMin) sum = mul_add(panel[p].min, splat(x_sum[t]), sum);
          store_f32(&sums[t][16 * p], mul_add(to_f32(acc[p]) * panel[p].scale, splat(x_scale[t]), sum));
        }
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int p = 0; p < P; ++p) store_rows(a, n + p * kPanelRows, t, load_f32(&sums[t][16 * p]));
}

template <class C>
void run_many(const LinearArgs& a) {
  int64_t n = a.row0;
  for (; n + kPanelRows < a.row1; n += 2 * kPanelRows) run_panels<C, 2>(a, n);
  if (n < a.row1) run_panels<C, 1>(a, n);
}

template <layout::Id kId>
bool can_run_dense(const Problem& p) {
  return p.layout == kId && fits_dense_panels(p);
}
template <layout::Id kId>
bool can_run_masked(const Problem& p) {
  return p.layout == kId && fits_masked_panels(p);
}

template <layout::Id kId, int kBits>
constexpr LinearKernel dense(const char* name, const char* one, const char* many) {
  using C = Dense<kBits>;
  return {name,
          can_run_dense<kId>,
          {.quantized = true, .sums = true},
          dense_prepared_bytes,
          prepare_dense,
          one,
          many,
          run_one_dense<C>,
          run_many<C>};
}
template <layout::Id kId, int kBits, int64_t kGroupCols = 0>
constexpr LinearKernel masked(const char* name, const char* one, const char* many) {
  using C = Masked<kBits, kGroupCols>;
  LinearKernel out{.name = name,
                   .can_run = can_run_masked<kId>,
                   .needs = {.quantized = true, .offset = 1},
                   .prepared_bytes = masked_prepared_bytes,
                   .prepare = prepare_masked,
                   .one_name = one,
                   .many_name = many,
                   .run_one = run_one_masked<C>,
                   .run_many = run_many<C>};
  out.place = place_masked;
  return out;
}
#define LACUNA_NAMES(name) "panels_" name, "gemv_panels_" name, "gemm_panels_" name
constexpr LinearKernel kGroupedKernels[] = {
    dense<layout::Id::gq2, 2>(LACUNA_NAMES("gq2")),
    dense<layout::Id::gq3, 3>(LACUNA_NAMES("gq3")),
    dense<layout::Id::gq4, 4>(LACUNA_NAMES("gq4")),
    dense<layout::Id::gq8, 8>(LACUNA_NAMES("gq8")),
    masked<layout::Id::bm2, 2>(LACUNA_NAMES("bm2")),
    masked<layout::Id::bm3, 3>(LACUNA_NAMES("bm3")),
    masked<layout::Id::bm4, 4>(LACUNA_NAMES("bm4")),
    masked<layout::Id::bm8, 8>(LACUNA_NAMES("bm8")),
    masked<layout::Id::nm24_q4, 4, 64>(LACUNA_NAMES("nm24_q4")),
};
#undef LACUNA_NAMES

}  // namespace

KernelList grouped_kernels() { return {kGroupedKernels, sizeof(kGroupedKernels) / sizeof(kGroupedKernels[0])}; }

}  // namespace lacuna::cpu::LACUNA_ISA
