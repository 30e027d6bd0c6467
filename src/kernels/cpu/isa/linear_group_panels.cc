// src/kernels/cpu/isa/linear_group_panels.cc - the gs layouts on panels of 128 rows (group_panels.h), for AVX-512 with
// VNNI and VBMI2: 16 kept groups of one place at a time, a row in each lane.
//
// All lanes read the same inputs, so that these are broadcast from memory and nothing is gathered. weight = scale *
// (code - zero): the zero's part is taken off in integers. The sums of a place's kept groups leave for the rows' own by
// an expansion under the place's mask, one place later, so that what was stored has left for the cache before it is
// read at other places. A row's sum is over the places in order, whatever else is in its panel.
#include "kernels/cpu/group_panels.h"
#include "kernels/cpu/isa/linear_panel.h"
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {

#if defined(__AVX512VBMI2__)

namespace {

/// Bytes; two streams that are asked for into the first cache, also on AMD's CPUs: on an EPYC 0.62 ns for a group of
/// 16, 0.74 with the far distance into the second.
constexpr int64_t kLinesAhead = 4096, kHeadsAhead = 1536;
constexpr int64_t kMasks = kGroupPanelRows / 16;  // of a place

LACUNA_INLINE uint32_t mask_at(const uint8_t* masks, int64_t b) {
  uint16_t mask;
  __builtin_memcpy(&mask, masks + 2 * b, 2);
  return mask;
}
LACUNA_INLINE int64_t count_kept(const uint8_t* masks) {
  int64_t kept = 0;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kGroupPanelMasks; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, masks + i, 8);
    kept += __builtin_popcountll(word);
  }
  return kept;
}

struct Panel {
  const uint8_t *heads, *lines;
};
LACUNA_INLINE Panel panel_at(const LinearArgs& a, int64_t n) {
  uint64_t at[2];
  __builtin_memcpy(at, a.weight + n / kGroupPanelRows * 16, 16);
  const auto* weight = reinterpret_cast<const uint8_t*>(a.weight);
  return {weight + at[0], weight + at[1]};
}

LACUNA_INLINE __m512i lanes(int32_t x) { return _mm512_set1_epi32(x); }
LACUNA_INLINE __m512i four_inputs(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
LACUNA_INLINE __m512 to_float(__m512i x) { return _mm512_maskz_cvtepi32_ps(__mmask16(0xffff), x); }

/// Inputs 4 j .. 4 j + 3 of 16 groups.
template <class Form>
LACUNA_INLINE __m512i codes_of(const uint8_t* lines, int64_t j) {
  constexpr int kShifts = 8 / Form::kWidth;
  __m512i codes = _mm512_load_si512(lines + 64 * (j / kShifts));
  if constexpr (Form::kWidth < 8) {
    codes = (__m512i)((RegU)codes >> (Form::kWidth * int(j % kShifts)));
    codes = _mm512_and_si512(codes, lanes(0x01010101 * ((1 << Form::kWidth) - 1)));
  }
  return codes;
}

/// 16 kept groups of place i: scale * sum((code - zero) * x), where a group lies in one block of inputs without the
/// inputs' scale.
template <class Form>
LACUNA_INLINE __m512 group_sums(const LinearArgs& a, int64_t i, const uint8_t* head, const uint8_t* lines) {
  constexpr int64_t kGroup = Form::kGroup, kUnit = kGroup < kBlock ? kGroup : kBlock, kParts = kBlock / kUnit;
  const __m512i zero = _mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), _mm_loadu_si128((const __m128i*)(head + 32)));
  const __m512 scale = _mm512_maskz_cvtph_ps(__mmask16(0xffff), _mm256_loadu_si256((const __m256i*)head));
  const __m512 ratio = _mm512_set1_ps(1 / kPlaneRatio);
  const auto block = [&](int64_t unit, const uint8_t* from) __attribute__((always_inline)) {
    const int64_t b = unit / kParts, part = unit % kParts;
    const int8_t* x = a.x.codes + 2 * b * kBlock + part * kUnit;
    const int32_t* start = a.x.start + 2 * b * kParts + part;
    __m512i coarse = _mm512_madd_epi16(zero, lanes(start[0])), fine = _mm512_madd_epi16(zero, lanes(start[kParts]));
#pragma GCC unroll 8
    for (int64_t j = 0; j < kUnit / 4; ++j) {
      const __m512i codes = codes_of<Form>(from, j);
      coarse = _mm512_dpbusd_epi32(coarse, codes, four_inputs(x + 4 * j));
      fine = _mm512_dpbusd_epi32(fine, codes, four_inputs(x + kBlock + 4 * j));
    }
    return _mm512_fmadd_ps(to_float(fine), ratio, to_float(coarse));
  };
  if constexpr (kGroup <= kBlock) {
    return _mm512_mul_ps(block(i, lines), scale);
  } else {
    __m512 sum = _mm512_setzero_ps();
    const int64_t b0 = i * (kGroup / kBlock), left = a.K / kBlock - b0;
    for (int64_t b = 0; b < (left < kGroup / kBlock ? left : kGroup / kBlock); ++b)
      sum = _mm512_fmadd_ps(block(b0 + b, lines + b * (kBlock / 4 * Form::kWidth / 8 * 64)),
                            _mm512_set1_ps(a.x.scale[2 * (b0 + b)]), sum);
    return _mm512_mul_ps(sum, scale);
  }
}

/// Adds a place's sums to those of its rows.
LACUNA_INLINE void spread(const uint8_t* masks, const float* sums, float x_scale, float* rows) {
  const __m512 scale = _mm512_set1_ps(x_scale);
#pragma GCC unroll 8
  for (int64_t b = 0; b < kMasks; ++b) {
    const uint32_t mask = mask_at(masks, b);
    const __m512 some = _mm512_maskz_expand_ps(__mmask16(mask), _mm512_loadu_ps(sums));
    _mm512_store_ps(rows + 16 * b, _mm512_mask3_fmadd_ps(some, scale, _mm512_load_ps(rows + 16 * b), __mmask16(mask)));
    sums += __builtin_popcount(mask);
  }
}

template <class Form>
void run_one(const LinearArgs& a) {
  constexpr int64_t kGroup = Form::kGroup;
  alignas(64) float rows[kGroupPanelRows], sums[2][kGroupPanelRows + 16];
  __builtin_memset(sums, 0, sizeof(sums));
  const int64_t groups = Form::groups(a.K);
  for (int64_t n = a.row0; n < a.row1; n += kGroupPanelRows) {
    Panel panel = panel_at(a, n);
    __builtin_memset(rows, 0, sizeof(rows));
    const uint8_t* masks = nullptr;
    float x_scale = 1;
    for (int64_t i = 0; i < groups; ++i) {
      const uint8_t* last_masks = masks;
      const float last_scale = x_scale;
      masks = panel.heads;
      const int64_t vectors = (count_kept(masks) + 15) / 16;
      panel.heads += kGroupPanelMasks;
      for (int64_t v = 0; v < vectors; ++v) {
        ask_ahead(panel.lines, kLinesAhead, Form::kLines * 64, false);
        ask_ahead(panel.heads, kHeadsAhead, 64, false);
        _mm512_store_ps(sums[i % 2] + 16 * v, group_sums<Form>(a, i, panel.heads, panel.lines));
        panel.heads += kGroupPanelHead;
        panel.lines += Form::kLines * 64;
      }
      if constexpr (kGroup <= kBlock) x_scale = a.x.scale[2 * (i * kGroup / kBlock)];
      if (i > 0) spread(last_masks, sums[(i + 1) % 2], last_scale, rows);
    }
    spread(masks, sums[(groups + 1) % 2], x_scale, rows);
    const int64_t end = a.row1 - n < kGroupPanelRows ? a.row1 - n : kGroupPanelRows;
    for (int64_t r = 0; r < end; ++r) a.y[n + r] = a.bias == nullptr ? rows[r] : rows[r] + a.bias[n + r];
  }
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
  Panel panel = panel_at(a, n);
  const int64_t b = n % kGroupPanelRows / 16;
  for (int64_t i = 0; i < Form::groups(a.K); ++i) {
    int64_t at = 0;
    for (int64_t before = 0; before < b; ++before) at += __builtin_popcount(mask_at(panel.heads, before));
    for (uint32_t mask = mask_at(panel.heads, b); mask != 0; mask &= mask - 1, ++at) {
      const int64_t r = __builtin_ctz(mask), lane = at % 16;
      const uint8_t* head = panel.heads + kGroupPanelMasks + at / 16 * kGroupPanelHead;
      const uint8_t* lines = panel.lines + at / 16 * Form::kLines * 64 + 4 * lane;
      uint16_t half;
      __builtin_memcpy(&half, head + 2 * lane, 2);
      scale[i * kPanelRows + r] = half_to_float(half);
      zero[i * kPanelRows + r] = head[32 + lane];
      const int64_t left = a.K - i * Form::kGroup, fours = (left < Form::kGroup ? left : Form::kGroup) / 4;
      for (int64_t j = 0; j < fours; ++j) {
        uint32_t four;
        __builtin_memcpy(&four, lines + 64 * (j / kShifts), 4);
        if constexpr (Form::kWidth < 8)
          four = four >> (Form::kWidth * (j % kShifts)) & (0x01010101u * ((1u << Form::kWidth) - 1));
        __builtin_memcpy(codes + ((i * Form::kGroup / 4 + j) * kPanelRows + r) * 4, &four, 4);
      }
    }
    const int64_t vectors = (count_kept(panel.heads) + 15) / 16;
    panel.heads += kGroupPanelMasks + vectors * kGroupPanelHead;
    panel.lines += vectors * Form::kLines * 64;
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
  return out;
}
#define LACUNA_NAME(id, group) "group_panels_" #id "_g" #group
#define LACUNA_GROUP(id, bits, group)                                                         \
  kernel<layout::Id::id, bits, group>(LACUNA_NAME(id, group), "gemv_" LACUNA_NAME(id, group), \
                                      "gemm_" LACUNA_NAME(id, group))
#define LACUNA_GROUPS(id, bits)                                                                                  \
  LACUNA_GROUP(id, bits, 8), LACUNA_GROUP(id, bits, 16), LACUNA_GROUP(id, bits, 32), LACUNA_GROUP(id, bits, 64), \
      LACUNA_GROUP(id, bits, 128)
constexpr LinearKernel kGroupPanelKernels[] = {
    LACUNA_GROUPS(gs2, 2),
    LACUNA_GROUPS(gs3, 3),
    LACUNA_GROUPS(gs4, 4),
    LACUNA_GROUPS(gs8, 8),
};
#undef LACUNA_GROUPS
#undef LACUNA_GROUP
#undef LACUNA_NAME

}  // namespace

KernelList group_panel_kernels() {
  return {kGroupPanelKernels, sizeof(kGroupPanelKernels) / sizeof(kGroupPanelKernels[0])};
}

#else

KernelList group_panel_kernels() { return {nullptr, 0}; }

#endif

}  // namespace lacuna::cpu::LACUNA_ISA
