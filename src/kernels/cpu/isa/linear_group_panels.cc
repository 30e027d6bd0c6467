// src/kernels/cpu/isa/linear_group_panels.cc - the gs layouts on panels of 128 rows (group_panels.h), for AVX-512 with
// VNNI and VBMI2: 16 kept groups of one place at a time, a row in each lane.
//
// All lanes read the same inputs, so that these are broadcast and nothing is gathered. weight = scale * (code - zero):
// the zero's part is taken off in integers. The sums of two places' kept groups leave for the rows' own by expansions
// under the places' masks, two places later, so that what was stored has left for the cache before it is read at other
// places. A row's sum is over the places in order, whatever else is in its panel.
// Of one token places whose inputs are all inactive are not read.
#include "kernels/cpu/group_panels.h"
#include "kernels/cpu/isa/linear_panel.h"
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {

#if defined(__AVX512VBMI2__)

namespace {

/// Where all places are read: bytes that are asked for ahead, into the first cache also on AMD's CPUs. On an EPYC two
/// threads take 0.59 ns for a kept group of 16 from 2 to 3 KiB ahead, 0.68 from 1 KiB, 0.78 from 4 KiB, which fall on
/// the same lines of the first cache as what is being read, and 0.78 into the second cache from further away.
constexpr int64_t kAhead = 2560;
/// Where places are left out: active places that are. On an EPYC, one thread, 4096 x 8192 from memory, 40% left out:
/// 0.53 ns for a kept group of 16, read or not, into its second cache, 1.07 with four places into the first, 0.58 where
/// all places are read.
constexpr int64_t kPlacesAhead = 12;
constexpr int64_t kMasks = kGroupPanelRows / 16;  // of a place

LACUNA_INLINE uint32_t mask_at(const uint8_t* masks, int64_t b) {
  uint16_t mask;
  __builtin_memcpy(&mask, masks + 2 * b, 2);
  return mask;
}
LACUNA_INLINE int64_t count_kept(const uint8_t* masks) {
  int64_t kept = 0;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kGroupPanelMask; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, masks + i, 8);
    kept += __builtin_popcountll(word);
  }
  return kept;
}

/// Walks the places of a panel.
template <class Form>
struct Walk {
  const uint8_t *masks, *place;
  int64_t i = 0;
  __attribute__((always_inline)) Walk(const LinearArgs& a, int64_t n) {
    uint64_t at;
    __builtin_memcpy(&at, a.weight + n / kGroupPanelRows * 8, 8);
    masks = reinterpret_cast<const uint8_t*>(a.weight) + at;
    place = masks + Form::groups(a.K) * kGroupPanelMask;
  }
  __attribute__((always_inline)) void next(int64_t kept) {
    place += Form::place_bytes(kept);
    masks += kGroupPanelMask;
    ++i;
  }
  /// The next place, this one included, whose inputs are active, or the end.
  __attribute__((always_inline)) void skip(const uint8_t* active, int64_t groups) {
    while (i < groups && active[i] == 0) next(count_kept(masks));
  }
};

LACUNA_INLINE __m512i lanes(int32_t x) { return _mm512_set1_epi32(x); }
LACUNA_INLINE __m512i four_inputs(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
LACUNA_INLINE __m512 to_float(__m512i x) { return _mm512_maskz_cvtepi32_ps(__mmask16(0xffff), x); }

/// Inputs 4 j .. 4 j + 3 of 16 groups. line: bytes from one line to the next.
template <class Form>
LACUNA_INLINE __m512i codes_of(const uint8_t* lines, int64_t line, int64_t j) {
  constexpr int kShifts = 8 / Form::kWidth;
  __m512i codes = _mm512_loadu_si512(lines + line * (j / kShifts));
  if constexpr (Form::kWidth < 8) {
    codes = (__m512i)((RegU)codes >> (Form::kWidth * int(j % kShifts)));
    codes = _mm512_and_si512(codes, lanes(0x01010101 * ((1 << Form::kWidth) - 1)));
  }
  return codes;
}

/// Zeros of 16 kept groups.
template <class Form>
LACUNA_INLINE __m512i zeros_of(const uint8_t* zeros) {
  __m128i bytes;
  if constexpr (Form::kZeroBits == 8) {
    bytes = _mm_loadu_si128((const __m128i*)zeros);
  } else {
    const __m128i pairs = _mm_loadl_epi64((const __m128i*)zeros), low = _mm_set1_epi8(15);
    bytes = _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
  }
  return _mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), bytes);
}

/// What 16 groups at a time are multiplied with: the inputs of a place in one block, four in each lane.
template <class Form>
struct Inputs {
  static constexpr int64_t kUnit = Form::kGroup < kBlock ? Form::kGroup : kBlock, kFours = kUnit / 4;
  __m512i coarse[kFours], fine[kFours], start[2];
  /// unit: of kUnit inputs.
  __attribute__((always_inline)) Inputs(const LinearArgs& a, int64_t unit) {
    constexpr int64_t kParts = kBlock / kUnit;
    const int64_t b = unit / kParts, part = unit % kParts;
    const int8_t* x = a.x.codes + 2 * b * kBlock + part * kUnit;
#pragma GCC unroll 8
    for (int64_t j = 0; j < kFours; ++j) {
      coarse[j] = four_inputs(x + 4 * j);
      fine[j] = four_inputs(x + kBlock + 4 * j);
    }
    start[0] = lanes(a.x.start[2 * b * kParts + part]);
    start[1] = lanes(a.x.start[(2 * b + 1) * kParts + part]);
  }
  /// sum((code - zero) * x) of 16 groups, without the inputs' scale. line: bytes from one line to the next.
  __attribute__((always_inline)) __m512 sums(__m512i zero, const uint8_t* lines, int64_t line) const {
    __m512i high = _mm512_madd_epi16(zero, start[0]), low = _mm512_madd_epi16(zero, start[1]);
#pragma GCC unroll 8
    for (int64_t j = 0; j < kFours; ++j) {
      const __m512i codes = codes_of<Form>(lines, line, j);
      high = _mm512_dpbusd_epi32(high, codes, coarse[j]);
      low = _mm512_dpbusd_epi32(low, codes, fine[j]);
    }
    return _mm512_fmadd_ps(to_float(low), _mm512_set1_ps(1 / kPlaneRatio), to_float(high));
  }
};

/// The sums of a place's kept groups, scale * sum((code - zero) * x), where a group lies in one block of inputs without
/// the inputs' scale. Past the last one up to 15 numbers hold anything.
template <class Form, bool kAsks>
LACUNA_INLINE void place_sums(const LinearArgs& a, const Walk<Form>& at, int64_t kept, float* sums) {
  constexpr int64_t kBlocks = Form::kGroup / kBlock;
  const Inputs<Form> x(a, at.i * (kBlocks > 0 ? kBlocks : 1));
  const uint8_t *zeros = at.place + Form::zeros_at(kept), *lines = at.place + Form::codes_at(kept);
  for (int64_t first = 0; first < kept; first += 16) {
    const int64_t line = 4 * (kept - first < 16 ? kept - first : 16);
    if constexpr (kAsks) ask_ahead(at.place + Form::place_bytes(first), kAhead, Form::place_bytes(16), false);
    const __m512 scale =
        _mm512_maskz_cvtph_ps(__mmask16(0xffff), _mm256_loadu_si256((const __m256i*)(at.place + 2 * first)));
    const __m512i zero = zeros_of<Form>(zeros + first * Form::kZeroBits / 8);
    const uint8_t* codes = lines + 4 * Form::kLines * first;
    __m512 sum = x.sums(zero, codes, line);
    if constexpr (kBlocks > 1) {
      const int64_t b0 = at.i * kBlocks, left = a.K / kBlock - b0, blocks = left < kBlocks ? left : kBlocks;
      sum = _mm512_mul_ps(sum, _mm512_set1_ps(a.x.scale[2 * b0]));
      for (int64_t b = 1; b < blocks; ++b)
        sum = _mm512_fmadd_ps(Inputs<Form>(a, b0 + b).sums(zero, codes + b * Form::kWidth * line, line),
                              _mm512_set1_ps(a.x.scale[2 * (b0 + b)]), sum);
    }
    _mm512_storeu_ps(sums + first, _mm512_mul_ps(sum, scale));
  }
}

/// Two places whose sums have not left for the rows yet.
struct Pair {
  static constexpr uint8_t kNone[kGroupPanelMask] = {};
  const uint8_t* masks[2] = {kNone, kNone};
  float x_scale[2] = {1, 1};
};

/// Adds their sums to those of their rows. kOneScale: both lie in one block of inputs.
template <bool kOneScale>
LACUNA_INLINE void spread(const Pair& pair, const float (&sums)[2][kGroupPanelRows + 16], float* rows) {
  const __m512 scale[2] = {_mm512_set1_ps(pair.x_scale[0]), _mm512_set1_ps(pair.x_scale[1])};
  const float* from[2] = {sums[0], sums[1]};
#pragma GCC unroll 8
  for (int64_t b = 0; b < kMasks; ++b) {
    const uint32_t mask[2] = {mask_at(pair.masks[0], b), mask_at(pair.masks[1], b)};
    const __m512 first = _mm512_maskz_expand_ps(__mmask16(mask[0]), _mm512_loadu_ps(from[0]));
    const __m512 second = _mm512_maskz_expand_ps(__mmask16(mask[1]), _mm512_loadu_ps(from[1]));
    __m512 sum = _mm512_load_ps(rows + 16 * b);
    if constexpr (kOneScale) {
      sum = _mm512_mask3_fmadd_ps(_mm512_add_ps(first, second), scale[0], sum, __mmask16(mask[0] | mask[1]));
    } else {
      sum = _mm512_mask3_fmadd_ps(first, scale[0], sum, __mmask16(mask[0]));
      sum = _mm512_mask3_fmadd_ps(second, scale[1], sum, __mmask16(mask[1]));
    }
    _mm512_store_ps(rows + 16 * b, sum);
    from[0] += __builtin_popcount(mask[0]);
    from[1] += __builtin_popcount(mask[1]);
  }
}

/// Asks for the next active place and goes past it.
template <class Form>
LACUNA_INLINE void ask_for_next(Walk<Form>& ahead, const LinearArgs& a, int64_t groups) {
  ahead.skip(a.active, groups);
  if (ahead.i == groups) return;
  const int64_t kept = count_kept(ahead.masks), bytes = Form::place_bytes(kept);
  if (a.far)
    for (int64_t line = 0; line < bytes + 63; line += 64) __builtin_prefetch(ahead.place + line, 0, 2);
  else
    for (int64_t line = 0; line < bytes + 63; line += 64) __builtin_prefetch(ahead.place + line);
  ahead.next(kept);
}

template <class Form, bool kSkips>
void run_panels(const LinearArgs& a) {
  alignas(64) float rows[kGroupPanelRows], sums[2][2][kGroupPanelRows + 16];
  __builtin_memset(sums, 0, sizeof(sums));
  const int64_t groups = Form::groups(a.K);
  for (int64_t n = a.row0; n < a.row1; n += kGroupPanelRows) {
    Walk<Form> at(a, n), ahead = at;
    __builtin_memset(rows, 0, sizeof(rows));
    for (int64_t i = 0; kSkips && i < kPlacesAhead; ++i) ask_for_next(ahead, a, groups);
    Pair pairs[2];
    for (int turn = 0;; turn ^= 1) {
      Pair& now = pairs[turn];
      now = {};
      int places = 0;
      for (; places < 2; ++places) {
        if constexpr (kSkips) at.skip(a.active, groups);
        if (at.i == groups) break;
        if constexpr (kSkips) ask_for_next(ahead, a, groups);
        const int64_t kept = count_kept(at.masks);
        place_sums<Form, !kSkips>(a, at, kept, sums[turn][places]);
        now.masks[places] = at.masks;
        if constexpr (Form::kGroup <= kBlock) now.x_scale[places] = a.x.scale[2 * (at.i * Form::kGroup / kBlock)];
        at.next(kept);
      }
      spread<!kSkips && (Form::kGroup < kBlock)>(pairs[turn ^ 1], sums[turn ^ 1], rows);
      if (places == 0) break;
    }
    const int64_t end = a.row1 - n < kGroupPanelRows ? a.row1 - n : kGroupPanelRows;
    for (int64_t r = 0; r < end; ++r) a.y[n + r] = a.bias == nullptr ? rows[r] : rows[r] + a.bias[n + r];
  }
}

template <class Form>
void run_one(const LinearArgs& a) {
  a.active == nullptr ? run_panels<Form, false>(a) : run_panels<Form, true>(a);
}

// ---- many tokens: 16 rows at a time are laid out as a dense panel, whose dropped groups have scale 0 ----

template <class Form>
constexpr int64_t panel_numbers(int64_t K) {
  return (K + Form::kGroup - 1) / Form::kGroup * kPanelRows;
}
template <class Form>
int64_t scratch_bytes(int64_t K) {
  return kPanelRows * K + 2 * 4 * panel_numbers<Form>(K) + 64;
}

/// codes: [K/4][16 rows][4]; scale, zero: [G][16 rows]. n: a multiple of 16.
template <class Form>
void fill_panel(const LinearArgs& a, int64_t n, uint8_t* codes, float* scale, uint32_t* zero) {
  constexpr int kShifts = 8 / Form::kWidth;
  __builtin_memset(codes, 0, size_t(kPanelRows * a.K));
  __builtin_memset(scale, 0, size_t(4 * panel_numbers<Form>(a.K)));
  __builtin_memset(zero, 0, size_t(4 * panel_numbers<Form>(a.K)));
  Walk<Form> at(a, n / kGroupPanelRows * kGroupPanelRows);
  const int64_t b = n % kGroupPanelRows / 16;
  while (at.i < Form::groups(a.K)) {
    const int64_t kept = count_kept(at.masks);
    int64_t g = 0;
    for (int64_t before = 0; before < b; ++before) g += __builtin_popcount(mask_at(at.masks, before));
    for (uint32_t mask = mask_at(at.masks, b); mask != 0; mask &= mask - 1, ++g) {
      const int64_t r = __builtin_ctz(mask), first = g / 16 * 16, line = 4 * (kept - first < 16 ? kept - first : 16);
      const uint8_t* lines = at.place + Form::codes_at(kept) + 4 * (first * Form::kLines + g - first);
      uint16_t half;
      __builtin_memcpy(&half, at.place + 2 * g, 2);
      scale[at.i * kPanelRows + r] = half_to_float(half);
      zero[at.i * kPanelRows + r] =
          at.place[Form::zeros_at(kept) + g * Form::kZeroBits / 8] >> (g * Form::kZeroBits % 8) &
          ((1 << Form::kZeroBits) - 1);
      const int64_t left = a.K - at.i * Form::kGroup, fours = (left < Form::kGroup ? left : Form::kGroup) / 4;
      for (int64_t j = 0; j < fours; ++j) {
        uint32_t four;
        __builtin_memcpy(&four, lines + line * (j / kShifts), 4);
        if constexpr (Form::kWidth < 8)
          four = four >> (Form::kWidth * (j % kShifts)) & (0x01010101u * ((1u << Form::kWidth) - 1));
        __builtin_memcpy(codes + ((at.i * Form::kGroup / 4 + j) * kPanelRows + r) * 4, &four, 4);
      }
    }
    at.next(kept);
  }
}

template <class Form>
void run_many(const LinearArgs& a) {
  constexpr int64_t kUnit = Form::kGroup < kBlock ? Form::kGroup : kBlock;
  constexpr int kParts = int(kBlock / kUnit), kFours = int(kUnit / 4);  // of a block: units, each of one group
  const int64_t tokens = a.x.tokens;
  float* scales = reinterpret_cast<float*>(a.scratch);
  auto* zeros = reinterpret_cast<uint32_t*>(scales + panel_numbers<Form>(a.K));
  auto* codes = reinterpret_cast<uint8_t*>(zeros + panel_numbers<Form>(a.K));
  alignas(64) float sums[kMaxTile][kPanelRows];
  for (int64_t n = a.row0; n < a.row1; n += kPanelRows) {
    fill_panel<Form>(a, n, codes, scales, zeros);
    __builtin_memset(sums, 0, size_t(tokens) * sizeof(sums[0]));
    for (int64_t b = 0; b < a.K / kBlock; ++b) {
      U32x16 code[8], zero[kParts];
      F32x16 scale[kParts];
      for (int j = 0; j < 8; ++j) code[j] = load_u32(codes + (8 * b + j) * 64);
      for (int g = 0; g < kParts; ++g) {
        const int64_t number = (b * kBlock + g * kUnit) / Form::kGroup * kPanelRows;
        scale[g] = load_f32(scales + number);
        zero[g] = load_u32(zeros + number);
      }
      const int8_t* x = a.x.codes + b * tokens * kBlock;
      const float* x_scale = a.x.scale + b * tokens;
      const int32_t* start = a.x.start + b * tokens * kParts;
      for (int64_t t = 0; t < tokens; ++t, x += kBlock, start += kParts) {
        F32x16 part = splat(0.0f);
#pragma GCC unroll 4
        for (int g = 0; g < kParts; ++g) {
          I32x16 acc;
          acc.reg[0] = (RegI)_mm512_madd_epi16((__m512i)zero[g].reg[0], lanes(start[g]));
#pragma GCC unroll 8
          for (int j = 0; j < kFours; ++j) acc = dot4<255>(acc, code[g * kFours + j], splat4(x + g * kUnit + 4 * j));
          part = mul_add(to_f32(acc), scale[g], part);
        }
        store_f32(sums[t], mul_add(part, splat(x_scale[t]), load_f32(sums[t])));
      }
    }
    for (int64_t t = 0; t < tokens; ++t) store_rows(a, n, t, load_f32(sums[t]));
  }
}

template <layout::Id kId, int64_t kGroup>
bool can_run(const Problem& p) {
  return p.layout == kId && p.params.group_size == kGroup && fits_group_sparse(p);
}

template <layout::Id kId, int kBits, int64_t kGroup>
constexpr LinearKernel kernel(const char* name, const char* one, const char* many) {
  using Form = GroupPanelForm<kBits, kGroup>;
  LinearKernel out{.name = name,
                   .can_run = can_run<kId, kGroup>,
                   .needs = {.quantized = true, .offset = 1, .group = int(kGroup < kBlock ? kGroup : kBlock)},
                   .prepared_bytes = group_panels_bytes<kBits, kGroup>,
                   .prepare = prepare_group_panels<kBits, kGroup>,
                   .one_name = one,
                   .many_name = many,
                   .run_one = run_one<Form>,
                   .run_many = run_many<Form>,
                   .scratch_bytes = scratch_bytes<Form>};
  out.place = place_group_panels<kBits, kGroup>;
  out.work_before = group_sparse_work;
  out.row_step = kGroupPanelRows;
  out.skips = kGroup;
  return out;
}
#define LACUNA_NAME(id, group) "group_panels_" #id "_g" #group
#define LACUNA_KERNEL(id, bits, group)                                                        \
  kernel<layout::Id::id, bits, group>(LACUNA_NAME(id, group), "gemv_" LACUNA_NAME(id, group), \
                                      "gemm_" LACUNA_NAME(id, group)),
constexpr LinearKernel kGroupPanelKernels[] = {LACUNA_EACH_GROUP_SPARSE(LACUNA_KERNEL)};
#undef LACUNA_KERNEL
#undef LACUNA_NAME

}  // namespace

KernelList group_panel_kernels() {
  return {kGroupPanelKernels, sizeof(kGroupPanelKernels) / sizeof(kGroupPanelKernels[0])};
}

#else

KernelList group_panel_kernels() { return {nullptr, 0}; }

#endif

}  // namespace lacuna::cpu::LACUNA_ISA
