// src/core/checked_math.h - 64-bit sizes from files: products and sums that refuse to wrap.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace lacuna {

inline std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}
inline std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t out = 0;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}
/// Product of all dims; nullopt on overflow or a negative one.
inline std::optional<int64_t> checked_product(std::span<const int64_t> dims) {
  std::optional<int64_t> out = 1;
  for (const int64_t dim : dims) {
    if (dim < 0) return std::nullopt;
    out = checked_mul(*out, dim);
    if (!out) return out;
  }
  return out;
}

}  // namespace lacuna
