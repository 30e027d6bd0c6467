// src/kernels/cpu/isa/active.cc - active inputs, 16 at a time as bits of a mask.
#include "kernels/cpu/active_isa.h"
#include "kernels/cpu/isa/linear_vec.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

/// Bit i: input k + i < end is active.
LACUNA_INLINE uint32_t mask_of(const ActiveArgs& a, int64_t k) {
  uint32_t mask = 0;
  const int64_t left = a.end - k;
  if (left < 16) {
    for (int64_t m = 0; m < a.M; ++m) {
      for (int64_t i = 0; i < left; ++i) {
        const float magnitude = __builtin_fabsf(a.x[m * a.K + k + i]);
        mask |= uint32_t(!((a.norms != nullptr ? magnitude * a.norms[k + i] : magnitude) < a.t)) << i;
      }
    }
    return mask;
  }
  for (int64_t m = 0; m < a.M; ++m) {
    F32x16 size = load_f32(a.x + m * a.K + k);
    for (int i = 0; i < kRegs; ++i) size.reg[i] = (RegF)((RegU)size.reg[i] & (RegU)splat_reg(0x7fffffff));
    if (a.norms != nullptr) size = size * load_f32(a.norms + k);
#if defined(__AVX512BW__)
    mask |= _mm512_cmp_ps_mask((__m512)size.reg[0], _mm512_set1_ps(a.t), _CMP_NLT_UQ);
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i) {
      const __m256 active = _mm256_cmp_ps((__m256)size.reg[i], _mm256_set1_ps(a.t), _CMP_NLT_UQ);
      mask |= uint32_t(_mm256_movemask_ps(active)) << (8 * i);
    }
#else
    float sizes[16];
    store_f32(sizes, size);
    for (int i = 0; i < 16; ++i) mask |= uint32_t(!(sizes[i] < a.t)) << i;
#endif
  }
  return mask;
}

}  // namespace

int64_t count_active(const ActiveArgs& a) {
  int64_t count = 0;
  for (int64_t k = a.begin; k < a.end; k += 16) count += __builtin_popcount(mask_of(a, k));
  return count;
}

int64_t write_active(const ActiveArgs& a, int32_t* out) {
  int64_t count = 0;
  for (int64_t k = a.begin; k < a.end; k += 16) {
    uint32_t mask = mask_of(a, k);
#if defined(__AVX512BW__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i indices = _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(k)));
    const int found = __builtin_popcount(mask);
    // A masked store of the compressed register: compressing into memory is slow on some CPUs.
    _mm512_mask_storeu_epi32(out + count, __mmask16((1u << found) - 1),
                             _mm512_maskz_compress_epi32(__mmask16(mask), indices));
    count += found;
#else
    for (; mask != 0; mask &= mask - 1) out[count++] = int32_t(k) + __builtin_ctz(mask);
#endif
  }
  return count;
}

}  // namespace lacuna::cpu::LACUNA_ISA
