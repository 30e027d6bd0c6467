// src/layout/fit.h - least-squares fits of scales and codes, eight sub-blocks side by side; what all encoders share.
//
// A tile holds eight sub-blocks of kLength weights with their importance, transposed: lane j is sub-block j, so that
// every step of a fit is the same arithmetic on eight numbers and the compiler needs no reduction across lanes.
// Everything is plain IEEE single precision without contraction, hence the same bytes on every machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "core/scalar.h"

#ifdef __clang__
#pragma clang fp contract(off)
#endif

namespace lacuna::layout {

/// Eight floats with element-wise arithmetic.
struct Float8 {
  using Half = float __attribute__((vector_size(16)));
  Half lo, hi;

  Float8() = default;
  Float8(Half lo_half, Half hi_half) : lo(lo_half), hi(hi_half) {}
  Float8(float all) : lo{all, all, all, all}, hi{all, all, all, all} {}  // NOLINT: a number is a vector of it
  float operator[](int j) const { return j < 4 ? lo[j] : hi[j - 4]; }
  void set(int j, float value) {
    Half& half = j < 4 ? lo : hi;
    half[j % 4] = value;
  }

  friend Float8 operator+(Float8 a, Float8 b) { return {a.lo + b.lo, a.hi + b.hi}; }
  friend Float8 operator-(Float8 a, Float8 b) { return {a.lo - b.lo, a.hi - b.hi}; }
  friend Float8 operator*(Float8 a, Float8 b) { return {a.lo * b.lo, a.hi * b.hi}; }
  friend Float8 operator/(Float8 a, Float8 b) { return {a.lo / b.lo, a.hi / b.hi}; }
  friend Float8 operator-(Float8 a) { return {-a.lo, -a.hi}; }
  Float8& operator+=(Float8 b) { return *this = *this + b; }

  friend Float8 min(Float8 a, Float8 b) { return {a.lo < b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi}; }
  friend Float8 max(Float8 a, Float8 b) { return {a.lo > b.lo ? a.lo : b.lo, a.hi > b.hi ? a.hi : b.hi}; }
  friend Float8 abs(Float8 a) { return max(a, -a); }
  /// a < b ? yes : no
  friend Float8 select_less(Float8 a, Float8 b, Float8 yes, Float8 no) {
    return {a.lo < b.lo ? yes.lo : no.lo, a.hi < b.hi ? yes.hi : no.hi};
  }
  /// a / b, or 0 where b is not above `least`.
  friend Float8 divide_or_zero(Float8 a, Float8 b, Float8 least = 0.0f) {
    return select_less(least, b, a / select_less(least, b, b, 1.0f), 0.0f);
  }
  /// Nearest integer, ties to even, for |a| < 2^22.
  friend Float8 round(Float8 a) {
    constexpr float kLastBitIsOne = 12582912.0f;  // 1.5 * 2^23
    return (a + kLastBitIsOne) - kLastBitIsOne;
  }
  /// Also for NaN a number of the range.
  friend Float8 round_clamped(Float8 a, Float8 lowest, Float8 highest) { return round(max(min(a, highest), lowest)); }
  friend float sum(Float8 a) {
    const Half half = a.lo + a.hi;
    return (half[0] + half[1]) + (half[2] + half[3]);
  }
  friend float largest(Float8 a) {
    float out = a[0];
    for (int j = 1; j < 8; ++j) out = std::max(out, a[j]);
    return out;
  }
};

template <int kLength>
struct Tile {
  Float8 x[kLength];  // weights over `unit`: magnitudes up to 1
  Float8 p[kLength];  // importance, positive
};

/// Largest magnitude of the weights; 0 where it is so small that every layout's scale would round to zero.
inline float magnitude(std::span<const float> w) {
  constexpr float kVanishing = 1e-30f;
  float out = 0;
  for (const float value : w) out = std::max(out, std::abs(value));
  return out < kVanishing ? 0.0f : out;
}

/// How a block's importance enters a tile: over its maximum, and at least a thousandth of its mean, so that what the
/// statistics never saw is stored as well as that costs nothing. No importance, or zero all over, counts as equal.
struct ImportanceScale {
  float factor = 0, floor = 1;
  explicit ImportanceScale(std::span<const float> importance) {
    const float top = importance.empty() ? 0.0f : *std::max_element(importance.begin(), importance.end());
    if (top < std::numeric_limits<float>::min()) return;
    factor = 1.0f / top;
    float total = 0;
    for (const float p : importance) total += p * factor;
    floor = 1e-3f * total / float(importance.size());
  }
};

/// Fills lane j with w: [kLength] over unit. importance: [kLength] or null.
template <int kLength>
void load_lane(Tile<kLength>& tile, int j, const float* w, float unit, const float* importance, ImportanceScale scale) {
  const float inverse = unit > 0 ? 1.0f / unit : 0.0f;
  for (int l = 0; l < kLength; ++l) {
    tile.x[l].set(j, w[l] * inverse);
    tile.p[l].set(j, importance ? std::max(importance[l] * scale.factor, scale.floor) : 1.0f);
  }
}

/// 1 / a, or 0 where |a| is not above `least`.
inline Float8 invert(Float8 a, Float8 least = 0.0f) {
  return divide_or_zero(1.0f, abs(a), least) * select_less(a, 0.0f, -1.0f, 1.0f);
}

/// Ranges and scales up to this are nothing beside weights of magnitude 1, and their inverse squared is still finite.
constexpr float kNegligible = 1e-9f;

// ---- x ~ scale * code + offset, code in 0..top -------------------------------------------------------------------

struct Affine {
  Float8 scale, offset;  // scale >= 0
};

/// Minimises sum p (x - scale * code - offset)^2 of every lane: codes from each pair of margins, then scale and
/// offset by weighted least squares on the codes; the best of them is refined by `rounds` of new codes and new least
/// squares. margins: how far inside the lane's range, in steps, the outermost codes are put. kAtMostZero: offset <= 0.
template <bool kAtMostZero, int kLength>
Affine fit_affine(const Tile<kLength>& tile, float top, std::span<const float> margins, int rounds) {
  Float8 lowest = tile.x[0], highest = tile.x[0], sum_p = 0.0f, sum_x = 0.0f;
  for (int l = 0; l < kLength; ++l) {
    lowest = min(lowest, tile.x[l]);
    highest = max(highest, tile.x[l]);
    sum_p += tile.p[l];
    sum_x += tile.p[l] * tile.x[l];
  }
  if (kAtMostZero) lowest = min(lowest, 0.0f);
  const Float8 mean = kAtMostZero ? min(sum_x / sum_p, 0.0f) : sum_x / sum_p;
  Affine best{0.0f, mean};
  Float8 best_gain = mean * (sum_x + sum_x - mean * sum_p);  // what of sum p x^2 the fit explains
  const auto try_codes = [&](Float8 from, Float8 inverse) {
    Float8 q = 0.0f, qq = 0.0f, qx = 0.0f;
    for (int l = 0; l < kLength; ++l) {
      const Float8 code = round_clamped((tile.x[l] - from) * inverse, 0.0f, top), pq = tile.p[l] * code;
      q += pq;
      qq += pq * code;
      qx += pq * tile.x[l];
    }
    const Float8 determinant = sum_p * qq - q * q, degenerate = 1e-6f * sum_p * qq;
    Float8 scale = divide_or_zero(sum_p * qx - q * sum_x, determinant, degenerate);
    Float8 offset = (sum_x - scale * q) / sum_p;
    if (kAtMostZero) {
      scale = select_less(0.0f, offset, divide_or_zero(qx, qq), scale);
      offset = min(offset, 0.0f);
    }
    const Float8 gain = scale * (qx + qx - scale * qq) + offset * (sum_x + sum_x - offset * sum_p - 2.0f * scale * q);
    best.scale = select_less(best_gain, gain, scale, best.scale);
    best.offset = select_less(best_gain, gain, offset, best.offset);
    best_gain = max(best_gain, gain);
  };
  const Float8 step = (highest - lowest) * (1.0f / top);
  for (const float low : margins)
    for (const float high : margins)
      try_codes(lowest + step * low, invert(step * (1.0f - (low + high) / top), kNegligible));
  for (int i = 0; i < rounds; ++i) try_codes(best.offset, invert(best.scale, kNegligible));
  best.scale = max(best.scale, 0.0f);
  return best;
}

// ---- x ~ scale * code, code in lowest..highest -------------------------------------------------------------------

/// Minimises sum p (x - scale * code)^2 of every lane: codes from each candidate for the code of the weight of largest
/// magnitude, then the scale by weighted least squares; `rounds` as in fit_affine. A candidate < 0 gives that weight a
/// negative code, so the scale takes the other sign.
template <int kLength>
Float8 fit_symmetric(const Tile<kLength>& tile, float lowest, float highest, std::span<const float> candidates,
                     int rounds) {
  Float8 bottom = tile.x[0], peak = tile.x[0];
  for (int l = 1; l < kLength; ++l) {
    bottom = min(bottom, tile.x[l]);
    peak = max(peak, tile.x[l]);
  }
  const Float8 inverse_extreme = invert(select_less(-bottom, peak, peak, bottom), kNegligible);
  Float8 best = 0.0f, best_error = 3e38f;
  const auto try_codes = [&](Float8 inverse) {
    Float8 rr = 0.0f, rq = 0.0f, qq = 0.0f;
    for (int l = 0; l < kLength; ++l) {
      const Float8 y = tile.x[l] * inverse, code = round_clamped(y, lowest, highest);
      const Float8 r = y - code, pr = tile.p[l] * r;
      rr += pr * r;
      rq += pr * code;
      qq += tile.p[l] * code * code;
    }
    const Float8 correction = divide_or_zero(rq, qq), width = divide_or_zero(1.0f, abs(inverse));
    const Float8 error = select_less(0.0f, width, (rr - rq * correction) * width * width, 3e38f);
    const Float8 scale = (correction + 1.0f) * width * select_less(inverse, 0.0f, -1.0f, 1.0f);
    best = select_less(error, best_error, scale, best);
    best_error = min(best_error, error);
  };
  for (const float candidate : candidates) try_codes(inverse_extreme * candidate);
  for (int i = 0; i < rounds; ++i) try_codes(invert(best, kNegligible));
  return best;
}

/// f16 scale nearest to value; beyond f16 the largest there is.
inline f16 scale_to_f16(float value) { return to_f16(std::clamp(value, -65504.0f, 65504.0f)); }

}  // namespace lacuna::layout
