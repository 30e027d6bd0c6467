// src/core/rng.h - a small seeded generator whose stream is part of our results: the same everywhere, for ever.
#pragma once

#include <cmath>
#include <cstdint>

namespace lacuna {

/// SplitMix64 (Steele, Lea, Flood 2014): 64-bit state, passes BigCrush, one multiply chain a draw.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// Uniform in [0, 1), 53 bits.
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  /// Uniform in [0, n), n > 0.
  uint64_t below(uint64_t n) { return uint64_t((static_cast<Wide>(next()) * n) >> 64); }
  /// Standard normal (Box-Muller, one value a call).
  double normal() {
    const double u = 1.0 - uniform(), v = uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

 private:
  __extension__ typedef unsigned __int128 Wide;
  uint64_t state_;
};

}  // namespace lacuna
