// tests/layout/rows.h - test rows that are the same on every machine: integer draws and exact divisions only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/rng.h"
#include "layout/layout.h"

namespace lacuna::layout::test_rows {

/// Bell-shaped, standard deviation about 0.02: twelve 16-bit draws, summed.
inline std::vector<float> bell(size_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> w(K);
  for (float& value : w) {
    int64_t total = -12 * 32768 + 6;
    for (int draw = 0; draw < 12; ++draw) total += int64_t(rng.below(65536));
    value = float(double(total) / 65536.0 / 64.0);
  }
  return w;
}

/// Positive, spread over three powers of ten.
inline std::vector<float> importance(size_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> p(K);
  for (float& value : p) value = float(1.0 / (double(1 + rng.below(1000)) / 1000.0));
  return p;
}

inline std::vector<std::byte> encode(const Layout& layout, std::span<const float> w, std::span<const float> p = {}) {
  std::vector<std::byte> row(size_t(layout.size_bytes({1, int64_t(w.size())})));
  layout.encode_row(layout, w, p, row);
  return row;
}

inline std::vector<float> decode(const Layout& layout, std::span<const std::byte> row, size_t K) {
  std::vector<float> w(K, 12345.0f);
  layout.decode_row(layout, row, w);
  return w;
}

/// decode(encode(w))
inline std::vector<float> stored(const Layout& layout, std::span<const float> w, std::span<const float> p = {}) {
  return decode(layout, encode(layout, w, p), w.size());
}

/// Sum of p (a - b)^2.
inline double squared_error(std::span<const float> a, std::span<const float> b, std::span<const float> p = {}) {
  double total = 0;
  for (size_t k = 0; k < a.size(); ++k)
    total += (double(a[k]) - double(b[k])) * (double(a[k]) - double(b[k])) * (p.empty() ? 1.0 : double(p[k]));
  return total;
}

}  // namespace lacuna::layout::test_rows
