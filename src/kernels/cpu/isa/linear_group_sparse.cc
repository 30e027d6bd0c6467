// src/kernels/cpu/isa/linear_group_sparse.cc - the gs layouts: kept groups of inputs along a row (group_sparse.h).
//
// weight = scale * (code - zero), so that a group's share of a sum is scale * (sum(code * x) - zero * sum(x)). A single
// token lies in two planes, coarse and fine, unit by unit (ActivationTile::unit_codes), so that one load has both of a
// group's inputs and one product of bytes adds up both: half of the lanes are coarse sums, half fine ones. What dropped
// groups' inputs hold is never read. Rows are not split: their results do not depend on the number of threads.
#include "kernels/cpu/group_sparse.h"
#include "kernels/cpu/isa/linear_panel.h"
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {

#if !defined(__AVX512VBMI2__)  // else linear_group_panels.cc has all of them

namespace {

/// A row of the prepared form. kept: its groups.
template <class Form>
struct Row {
  const uint8_t *masks, *zeros, *scales, *codes;
  LACUNA_INLINE int64_t count(const uint8_t* masks, int64_t K) {
    int64_t kept = 0;
    for (int64_t i = 0; i < Form::zeros_at(K); i += 4) {
      uint32_t mask;
      __builtin_memcpy(&mask, masks + i, 4);
      kept += __builtin_popcount(mask);
    }
    return kept;
  }
  __attribute__((always_inline)) Row(const uint8_t* row, int64_t K, int64_t kept)
      : masks(row),
        zeros(row + Form::zeros_at(K)),
        scales(row + Form::scales_at(K, kept)),
        codes(row + Form::codes_at(K, kept)) {}
};

LACUNA_INLINE const uint8_t* first_row(const LinearArgs& a) {
  uint64_t at;
  __builtin_memcpy(&at, a.weight + 8 * a.row0, 8);
  return reinterpret_cast<const uint8_t*>(a.weight) + at;
}

template <int kBits>
LACUNA_INLINE uint32_t zero_of(const uint8_t* zeros, int64_t j) {
  return kBits == 8 ? zeros[j] : uint32_t(zeros[j / 2]) >> (4 * (j % 2)) & 15;
}

LACUNA_INLINE float scale_of(const uint8_t* scales, int64_t j) {
  uint16_t half;
  __builtin_memcpy(&half, scales + 2 * j, 2);
  return half_to_float(half);
}

/// Calls use(j, i) for the kept groups in turn: the j-th of the row is the group of inputs i.
template <class Use>
LACUNA_INLINE int64_t each_group(const uint8_t* masks, int64_t bytes, const Use& use) {
  int64_t j = 0;
  for (int64_t w = 0; w < bytes; w += 4) {
    uint32_t mask;
    __builtin_memcpy(&mask, masks + w, 4);
    for (; mask != 0; mask &= mask - 1) use(j++, 8 * w + __builtin_ctz(mask));
  }
  return j;
}

// ---- one token ----

/// Codes of a unit, a byte each.
template <int kBits, class Form>
LACUNA_INLINE void read_unit(const uint8_t* codes, int64_t unit, uint8_t* out) {
  const uint8_t* chunk = codes + unit / Form::kChunk * Form::kChunkBytes;
  const int q = int(unit % Form::kChunk);
  for (int64_t i = 0; i < Form::kUnit; ++i) {
    if constexpr (kBits == 3)
      out[i] =
          uint8_t((chunk[q / 4 * Form::kUnit + i] >> (2 * (q % 4)) & 3) | (chunk[2 * Form::kUnit + i] >> q & 1) << 2);
    else
      out[i] = uint8_t(chunk[i] >> (kBits * q) & ((1 << kBits) - 1));
  }
}

#if defined(__AVX2__)
/// 32 codes times 32 inputs.
template <int kBits>
LACUNA_INLINE __m256i products(__m256i codes, __m256i x) {
  if constexpr (kBits < 8) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1));
  } else {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    return _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8)));
  }
}

/// Codes of a unit in both planes' lanes: 16 bytes twice, of 8 inputs 8 bytes four times.
template <int kBits, class Form>
LACUNA_INLINE __m256i unit_codes(const uint8_t* codes, int64_t unit, int64_t half) {
  const uint8_t* chunk = codes + unit / Form::kChunk * Form::kChunkBytes + 16 * half;
  const int q = int(unit % Form::kChunk);
  const auto load = [](const uint8_t* p) {
    if constexpr (Form::kUnit == 8) {
      long long eight;
      __builtin_memcpy(&eight, p, 8);
      return _mm256_set1_epi64x(eight);
    } else {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    }
  };
  const auto field = [](__m256i a, int shift, int mask) {
    return _mm256_and_si256(_mm256_srl_epi16(a, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(char(mask)));
  };
  if constexpr (kBits == 8)
    return load(chunk);
  else if constexpr (kBits == 3)
    return _mm256_or_si256(field(load(chunk + q / 4 * Form::kUnit), 2 * (q % 4), 3),
                           _mm256_slli_epi16(field(load(chunk + 2 * Form::kUnit), q, 1), 2));
  else
    return field(load(chunk), kBits * q, (1 << kBits) - 1);
}
#endif

template <int kBits, int64_t kGroup>
void run_one(const LinearArgs& a) {
  using Form = GroupSparseForm<kBits, kGroup>;
  const uint8_t* at = first_row(a);
  for (int64_t n = a.row0; n < a.row1; ++n) {
    const int64_t kept = Row<Form>::count(at, a.K), bytes = Form::row_bytes(a.K, kept);
    const Row<Form> row(at, a.K, kept);
    ask_ahead(at, kPrefetch, bytes, a.far);
    at += bytes;
    float less = 0;
#if defined(__AVX2__)
    __m256 coarse = _mm256_setzero_ps(), fine = coarse, mixed = coarse;  // mixed: coarse lanes, then fine ones
#else
    float coarse = 0, fine = 0;
#endif
    each_group(
        row.masks, Form::zeros_at(a.K), [&](int64_t j, int64_t i) __attribute__((always_inline)) {
          if (a.active != nullptr && a.active[i] == 0) return;
          const float scale = scale_of(row.scales, j);
          less += scale * float(zero_of<kBits>(row.zeros, j)) * a.x.group_sum[i];
          for (int64_t part = 0; part < Form::kUnits; ++part) {
            const int64_t unit = j * Form::kUnits + part, place = i * Form::kUnits + part;
            const int8_t* x = a.x.unit_codes + place * 2 * Form::kUnit;
            const float factor = scale * a.x.unit_scale[place];
#if defined(__AVX2__)
            if constexpr (Form::kUnit == 32) {
              for (int64_t half = 0; half < 2; ++half) {
                // 16 inputs of both planes side by side.
                const __m256i both =
                    _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(x + 16 * half))),
                                            _mm_loadu_si128((const __m128i*)(x + 32 + 16 * half)), 1);
                const __m256i sums = products<kBits>(unit_codes<kBits, Form>(row.codes, unit, half), both);
                __m256& to = half == 0 ? mixed : coarse;
                to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(factor), to);
              }
            } else if constexpr (Form::kUnit == 16) {
              const __m256i sums =
                  products<kBits>(unit_codes<kBits, Form>(row.codes, unit, 0), _mm256_loadu_si256((const __m256i*)x));
              mixed = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(factor), mixed);
            } else {
              const __m256i sums = products<kBits>(unit_codes<kBits, Form>(row.codes, unit, 0),
                                                   _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)x)));
              fine = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(factor), fine);
            }
#else
        uint8_t codes[Form::kUnit];
        read_unit<kBits, Form>(row.codes, unit, codes);
        int32_t high = 0, low = 0;
        for (int64_t c = 0; c < Form::kUnit; ++c) {
          high += int32_t(codes[c]) * int32_t(x[c]);
          low += int32_t(codes[c]) * int32_t(x[Form::kUnit + c]);
        }
        coarse += float(high) * factor;
        fine += float(low) * factor;
#endif
          }
        });
#if defined(__AVX2__)
    const __m128 ratio = _mm_set1_ps(1 / kPlaneRatio);
    mixed = _mm256_add_ps(mixed, coarse);
    __m128 all = _mm_fmadd_ps(_mm256_extractf128_ps(mixed, 1), ratio, _mm256_castps256_ps128(mixed));
    const __m128 eight = _mm256_castps256_ps128(fine);  // two coarse lanes, two fine ones
    all = _mm_add_ps(
        all, _mm_fmadd_ps(_mm_movehl_ps(_mm_setzero_ps(), eight), ratio, _mm_movelh_ps(eight, _mm_setzero_ps())));
    all = _mm_add_ps(all, _mm_movehl_ps(all, all));
    const float sum = _mm_cvtss_f32(_mm_add_ss(all, _mm_movehdup_ps(all))) - less;
#else
    const float sum = coarse + fine * (1 / kPlaneRatio) - less;
#endif
    a.y[n] = a.bias == nullptr ? sum : sum + a.bias[n];
  }
}

// ---- many tokens: rows are laid out as a dense panel, whose dropped groups have scale and zero 0 ----

template <int64_t kGroup>
constexpr int64_t panel_numbers(int64_t K) {
  return (K + kGroup - 1) / kGroup * kPanelRows;
}
template <int64_t kGroup>
int64_t scratch_bytes(int64_t K) {
  return kPanelRows * K + 2 * 4 * panel_numbers<kGroup>(K) + 64;
}

/// The codes of a unit as bytes.
template <int kBits, class Form>
LACUNA_INLINE void unpack_unit(const uint8_t* codes, int64_t unit, uint8_t* out) {
  const uint8_t* chunk = codes + unit / Form::kChunk * Form::kChunkBytes;
  const int q = int(unit % Form::kChunk);
  for (int64_t i = 0; i < Form::kUnit; i += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, chunk + (kBits == 3 ? q / 4 * Form::kUnit : 0) + i, 8);
    if constexpr (kBits == 3) {
      uint64_t high;
      __builtin_memcpy(&high, chunk + 2 * Form::kUnit + i, 8);
      eight = (eight >> (2 * (q % 4)) & 0x0303030303030303u) | (high >> q & 0x0101010101010101u) << 2;
    } else if constexpr (kBits < 8) {
      eight = eight >> (kBits * q) & (0x0101010101010101u * ((1u << kBits) - 1));
    }
    __builtin_memcpy(out + i, &eight, 8);
  }
}

/// codes: [K/4][16 rows][4]; scale, min: [G][16 rows].
template <int kBits, int64_t kGroup>
void fill_panel(const LinearArgs& a, const uint8_t*& at, int64_t rows, uint8_t* codes, float* scale, float* min) {
  using Form = GroupSparseForm<kBits, kGroup>;
  __builtin_memset(codes, 0, size_t(kPanelRows * a.K));
  __builtin_memset(scale, 0, size_t(4 * panel_numbers<kGroup>(a.K)));
  __builtin_memset(min, 0, size_t(4 * panel_numbers<kGroup>(a.K)));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t kept = Row<Form>::count(at, a.K);
    const Row<Form> row(at, a.K, kept);
    each_group(
        row.masks, Form::zeros_at(a.K), [&](int64_t j, int64_t i) __attribute__((always_inline)) {
          const float s = scale_of(row.scales, j);
          scale[i * kPanelRows + r] = s;
          min[i * kPanelRows + r] = -s * float(zero_of<kBits>(row.zeros, j));
          for (int64_t part = 0; part < Form::kUnits; ++part) {
            const int64_t k = i * kGroup + part * Form::kUnit;
            if (k >= a.K) break;  // the last group may be shorter; K is a multiple of every unit
            uint8_t unit[Form::kUnit];
            unpack_unit<kBits, Form>(row.codes, j * Form::kUnits + part, unit);
            for (int64_t c = 0; c < Form::kUnit; c += 4)
              __builtin_memcpy(codes + (k + c) * kPanelRows + 4 * r, unit + c, 4);
          }
        });
    at += Form::row_bytes(a.K, kept);
  }
}

template <int kBits, int64_t kGroup>
void run_many(const LinearArgs& a) {
  using Form = GroupSparseForm<kBits, kGroup>;
  constexpr int kParts = int(kBlock / Form::kUnit);  // units of a block, each of one group
  constexpr int kFours = int(Form::kUnit / 4);
  const int64_t tokens = a.x.tokens;
  float* scales = reinterpret_cast<float*>(a.scratch);
  float* mins = scales + panel_numbers<kGroup>(a.K);
  auto* codes = reinterpret_cast<uint8_t*>(mins + panel_numbers<kGroup>(a.K));
  const uint8_t* at = first_row(a);
  alignas(64) float sums[kMaxTile][kPanelRows];
  for (int64_t n = a.row0; n < a.row1; n += kPanelRows) {
    const int64_t rows = a.row1 - n < kPanelRows ? a.row1 - n : kPanelRows;
    fill_panel<kBits, kGroup>(a, at, rows, codes, scales, mins);
    __builtin_memset(sums, 0, size_t(tokens) * sizeof(sums[0]));
    for (int64_t b = 0; b < a.K / kBlock; ++b) {
      U32x16 code[8];
      F32x16 scale[kParts], min[kParts];
      for (int j = 0; j < 8; ++j) code[j] = load_u32(codes + (8 * b + j) * 64);
      for (int g = 0; g < kParts; ++g) {
        const int64_t number = (b * kBlock + g * Form::kUnit) / kGroup * kPanelRows;
        scale[g] = load_f32(scales + number);
        min[g] = load_f32(mins + number);
      }
      const int8_t* x = a.x.codes + b * tokens * kBlock;
      const float* x_scale = a.x.scale + b * tokens;
      const float* x_sum = a.x.sum + b * tokens * kParts;
      for (int64_t t = 0; t < tokens; ++t, x += kBlock, x_sum += kParts) {
        F32x16 sum = load_f32(sums[t]), part = splat(0.0f);
#pragma GCC unroll 4
        for (int g = 0; g < kParts; ++g) {
          I32x16 acc = splat(int32_t{0});
#pragma GCC unroll 8
          for (int j = 0; j < kFours; ++j)
            acc = dot4<(1 << kBits) - 1>(acc, code[g * kFours + j], splat4(x + g * Form::kUnit + 4 * j));
          part = mul_add(to_f32(acc), scale[g], part);
          sum = mul_add(min[g], splat(x_sum[g]), sum);
        }
        store_f32(sums[t], mul_add(part, splat(x_scale[t]), sum));
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
  LinearKernel out{.name = name,
                   .can_run = can_run<kId, kGroup>,
                   .needs = {.quantized = true,
                             .group = int(GroupSparseForm<kBits, kGroup>::kUnit),
                             .sums = true,
                             .sparse_group = int(kGroup)},
                   .prepared_bytes = group_sparse_prepared_bytes<kBits, kGroup>,
                   .prepare = prepare_group_sparse<kBits, kGroup>,
                   .one_name = one,
                   .many_name = many,
                   .run_one = run_one<kBits, kGroup>,
                   .run_many = run_many<kBits, kGroup>,
                   .scratch_bytes = scratch_bytes<kGroup>};
  out.place = place_group_sparse<kBits, kGroup>;
  out.work_before = group_sparse_work;
  out.skips = kGroup;
  return out;
}
#define LACUNA_NAME(id, group) "groups_" #id "_g" #group
#define LACUNA_KERNEL(id, bits, group)                                                        \
  kernel<layout::Id::id, bits, group>(LACUNA_NAME(id, group), "gemv_" LACUNA_NAME(id, group), \
                                      "gemm_" LACUNA_NAME(id, group)),
constexpr LinearKernel kGroupSparseKernels[] = {LACUNA_EACH_GROUP_SPARSE(LACUNA_KERNEL)};
#undef LACUNA_KERNEL
#undef LACUNA_NAME

}  // namespace

KernelList group_sparse_kernels() {
  return {kGroupSparseKernels, sizeof(kGroupSparseKernels) / sizeof(kGroupSparseKernels[0])};
}

#else

KernelList group_sparse_kernels() { return {nullptr, 0}; }

#endif

}  // namespace lacuna::cpu::LACUNA_ISA
