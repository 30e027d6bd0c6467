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
constexpr int64_t kPrefetch = 2048;  // bytes ahead of what is being read
#else
constexpr int64_t kPrefetch = 1024;
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
  out.reg[0] = (RegU)_mm512_mask_expand_epi8(fill.bytes, mask, _mm512_loadu_si512(next));
  next += __builtin_popcountll(mask);
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

/// Unpacks the chunks that hold codes [first, last) to bytes.
template <int kBits>
LACUNA_INLINE void unpack(const uint8_t* chunks, int64_t first, int64_t last, uint8_t* out) {
  constexpr int64_t kCodes = chunk_codes(kBits);
  const uint8_t* from = chunks + first / kCodes * chunk_bytes(kBits);
  for (int64_t code = first / kCodes * kCodes; code < last; code += kCodes, from += chunk_bytes(kBits)) {
    for (int64_t line = 0; line < chunk_bytes(kBits); line += 64) __builtin_prefetch(from + kPrefetch + line);
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
    }
    __attribute__((always_inline)) void begin_group(int64_t g) {
      scale = load_f16(scales_ + g * kGroupBytes);
      min = scale * load_f16(scales_ + g * kGroupBytes + 32) * splat(-1.0f);
    }
    __attribute__((always_inline)) void begin_block(int64_t b) {
      block_ = codes_ + b * 64 * kBits;
      for (int line = 0; line < 64 * kBits; line += 64) __builtin_prefetch(block_ + kPrefetch + line);
    }
    __attribute__((always_inline)) U32x16 load(int j) {
      return load_codes < kBits == 3 ? 2 : kBits, kBits == 3 ? 1 : 0 > (block_, j);
    }
    __attribute__((always_inline)) I32x16 start(const int32_t*) const { return splat(int32_t{0}); }
    F32x16 scale, min;

   private:
    const uint8_t *codes_, *scales_, *block_;
  };
};

/// bm, nm24_q4: codes under a mask.
template <int kBits, int64_t kGroupCols>
struct Masked {
  static constexpr int kMaxCode = (1 << kBits) - 1;
  static constexpr bool kMin = false;
  static constexpr int64_t kGroup = kGroupCols;
  class Panel {
   public:
    __attribute__((always_inline)) void open(const LinearArgs& a, int64_t n, int64_t group) {
      uint64_t at;
      __builtin_memcpy(&at, a.weight + n / kPanelRows * 8, 8);
      scales_ = reinterpret_cast<const uint8_t*>(a.weight) + at;
      masks_ = scales_ + masks_at(a.K, group);
      starts_ = scales_ + starts_at(a.K, group);
      codes_ = scales_ + codes_at(a.K, group);
      steps_ = (a.K + kStepCols - 1) / kStepCols;
      unpack_step(0);
    }
    __attribute__((always_inline)) void begin_group(int64_t g) {
      const uint8_t* at = scales_ + g * kGroupBytes;
      scale = load_f16(at);
      zero_ = load_u8(at + 32);
      fill_ = make_fill(at + 32);
    }
    __attribute__((always_inline)) void begin_block(int64_t b) {
      constexpr int64_t kBlocks = kStepCols / kBlock;
      if (b % kBlocks == 0) {
        const int64_t step = b / kBlocks, first = start_of(step);
        // The next step's codes, so that they have left for the cache before they are read.
        unpack_step(step + 1);
        next_ = kBits == 8 ? codes_ + first : steps_of_codes_[step % 2] + first % chunk_codes(kBits);
      }
      if (kBits == 8)
        for (int line = 0; line < 256; line += 64) __builtin_prefetch(next_ + kPrefetch + line);
      block_ = masks_ + b * 64;
      __builtin_prefetch(block_ + kPrefetch);
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
    __attribute__((always_inline)) int64_t start_of(int64_t step) const {
      uint32_t start;
      __builtin_memcpy(&start, starts_ + 4 * step, 4);
      return start;
    }
    __attribute__((always_inline)) void unpack_step(int64_t step) {
      if (kBits < 8 && step < steps_)
        unpack<kBits>(codes_, start_of(step), start_of(step + 1), steps_of_codes_[step % 2]);
    }
    const uint8_t *scales_, *masks_, *starts_, *codes_, *block_, *next_ = nullptr;
    int64_t steps_;
    U32x16 zero_;
    Fill fill_;
    /// Codes of a step, before and after them the rest of their chunks, and what an expansion may read of 64.
    static constexpr int64_t kStepBytes = kBits == 8 ? 64 : kPanelRows * kStepCols + 2 * chunk_codes(kBits) + 64;
    alignas(64) uint8_t steps_of_codes_[2][kStepBytes];
  };
};

template <class C>
LACUNA_INLINE int64_t group_of(const LinearArgs& a) {
  if (C::kGroup > 0) return C::kGroup;
  const int64_t group = a.view->params.group_size;
  return group <= 0 || group > a.K ? a.K : group;
}

/// One token in two planes, one panel at a time.
template <class C>
void run_one(const LinearArgs& a) {
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
        I32x16 coarse = panel.start(a.x.start + 2 * b), fine = panel.start(a.x.start + 2 * b + 1);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          const U32x16 four = panel.load(j);
          coarse = dot4<C::kMaxCode>(coarse, four, splat4(x + 4 * j));
          fine = dot4<C::kMaxCode>(fine, four, splat4(x + kBlock + 4 * j));
        }
        const F32x16 both = mul_add(to_f32(fine), splat(1 / kPlaneRatio), to_f32(coarse));
        part = mul_add(both, splat(a.x.scale[2 * b]), part);
        if constexpr (C::kMin) inputs += a.x.sum[2 * b];
      }
      sum = mul_add(part, panel.scale, sum);
      if constexpr (C::kMin) sum = mul_add(panel.min, splat(inputs), sum);
    }
    store_rows(a, n, 0, sum);
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
  return {
      name,       can_run_dense<kId>, {.quantized = true, .sums = true}, dense_prepared_bytes, prepare_dense, one, many,
      run_one<C>, run_many<C>};
}
template <layout::Id kId, int kBits, int64_t kGroupCols = 0>
constexpr LinearKernel masked(const char* name, const char* one, const char* many) {
  using C = Masked<kBits, kGroupCols>;
  return {name,
          can_run_masked<kId>,
          {.quantized = true, .offset = 1},
          masked_prepared_bytes,
          prepare_masked,
          one,
          many,
          run_one<C>,
          run_many<C>};
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
