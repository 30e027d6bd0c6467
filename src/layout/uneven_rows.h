// src/layout/uneven_rows.h - what bm.cc and gs.cc share: sections of a matrix whose rows have different lengths.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/scalar.h"

namespace lacuna::layout {

inline constexpr int64_t kSection = 32;  // alignment of sections: GGUF's own

/// Entry n of the u32 array that such a matrix begins with.
inline uint32_t row_start(std::span<const std::byte> bytes, int64_t n) {
  uint32_t start;
  std::memcpy(&start, bytes.data() + 4 * n, sizeof(start));
  return start;
}

inline bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

inline float half_at(const std::byte* at) {
  f16 half;
  std::memcpy(&half, at, sizeof(half));
  return to_float(half);
}

}  // namespace lacuna::layout
