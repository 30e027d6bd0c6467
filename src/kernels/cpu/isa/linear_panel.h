// src/kernels/cpu/isa/linear_panel.h - what the kernels on panels of 16 rows share: codes of a block of 32 inputs in
// planes of bits (linear_panels.cc says how), and where the 16 sums go.
#pragma once

#include "kernels/cpu/isa/linear_vec.h"
#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu::LACUNA_ISA {

#if defined(__AVX512BW__)
constexpr int64_t kPrefetch = 2048;  // bytes ahead of what is being read
#else
constexpr int64_t kPrefetch = 1024;
#endif
constexpr int64_t kFarPrefetch = 20480;  // where prefetches_far(): more than the lines under way at any rate of memory

/// Asks for `bytes` of a stream of weights that will be read after those at p.
LACUNA_INLINE void ask_ahead(const uint8_t* p, int64_t near, int64_t bytes, bool far) {
  if (far) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + kFarPrefetch + line, 0, 2);
  } else {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + near + line);
  }
}

/// Codes of vector j: inputs 4j..4j+3 of 16 rows.
template <int kLow, int kHigh>
LACUNA_INLINE U32x16 load_codes(const uint8_t* block, int j) {
  constexpr uint32_t kLowMask = 0x01010101u * ((1u << kLow) - 1);
  U32x16 codes = load_u32(block + 64 * (j % kLow));
  if constexpr (kLow < 8) codes = (codes >> (kLow * (j / kLow))) & kLowMask;
  if constexpr (kHigh > 0) {
    constexpr uint32_t kHighMask = 0x01010101u * (((1u << kHigh) - 1) << kLow);
    const U32x16 high = load_u32(block + 64 * kLow + 64 * (j % kHigh));
    const int left = kLow - kHigh * (j / kHigh);
    codes = codes | ((left >= 0 ? high << left : high >> -left) & kHighMask);
  }
  return codes;
}

LACUNA_INLINE void store_rows(const LinearArgs& a, int64_t n, int64_t t, const F32x16& sum) {
  float lanes[16];
  store_f32(lanes, sum);
  const int64_t rows = a.N - n < kPanelRows ? a.N - n : kPanelRows;
  float* y = a.y + t * a.y_stride + n;
  if (rows == kPanelRows && a.bias == nullptr) {
    store_f32(y, sum);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) y[r] = a.bias == nullptr ? lanes[r] : lanes[r] + a.bias[n + r];
}

}  // namespace lacuna::cpu::LACUNA_ISA
