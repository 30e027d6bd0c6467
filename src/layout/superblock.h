// src/layout/superblock.h - the second level of the K layouts: integer scales of the sub-blocks under one f16 scale.
//
// After every sub-block has its own best scale (fit.h), the scales are rounded to integers times d (and the minima to
// integers times dmin). Then, in turn: each sub-block tries its neighbouring integers with codes rounded anew; d and
// dmin follow by least squares over the superblock. The best of all states is kept, so no step can make it worse.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "layout/fit.h"

namespace lacuna::layout {

constexpr int kSuperblock = 256;

/// weight = (d * scale) * code - (dmin * min)
template <int kLength>
struct AffineSuperblock {
  static constexpr int kSubBlocks = kSuperblock / kLength;
  f16 d, dmin;
  uint8_t scale[kSubBlocks], min[kSubBlocks];
  uint8_t code[kSuperblock];  // in the order of the weights
};

/// weight = (d * scale) * code
template <int kLength>
struct SymmetricSuperblock {
  static constexpr int kSubBlocks = kSuperblock / kLength;
  f16 d;
  int8_t scale[kSubBlocks];
  int8_t code[kSuperblock];  // in the order of the weights
};

/// f16 >= value but for a 512th; value >= 0. A scale just too small would clip the largest of what it scales.
inline f16 scale_to_f16_upwards(float value) {
  f16 out = scale_to_f16(value);
  if (to_float(out) < value * (511.0f / 512.0f) && out.bits < 0x7bffu) ++out.bits;
  return out;
}

template <int kLength, size_t kGroups>
void load_tiles(std::span<const float> w, std::span<const float> importance, float unit,
                std::array<Tile<kLength>, kGroups>& tiles) {
  const ImportanceScale scale(importance);
  for (size_t s = 0; s < 8 * kGroups; ++s)
    load_lane(tiles[s / 8], int(s % 8), w.data() + s * kLength, unit,
              importance.empty() ? nullptr : importance.data() + s * kLength, scale);
}

struct AffineSearch {
  float top;                       // largest code
  float levels;                    // largest integer scale and min
  std::span<const float> margins;  // see fit_affine
  int fit_rounds;
  int rounds;  // of neighbours and least squares
};

struct SymmetricSearch {
  float lowest, highest;              // code
  float scale_lowest, scale_highest;  // integer scale
  std::span<const float> candidates;  // see fit_symmetric
  int fit_rounds;
  int rounds;
};

namespace superblock {

/// Whether some sub-block lies further above zero than any lies below it. Minima are magnitudes below zero, so such a
/// superblock is fitted negated, with negative d and dmin.
template <int kLength>
bool lies_above_zero(std::span<const Tile<kLength>> tiles) {
  float above = 0, below = 0;
  for (const Tile<kLength>& tile : tiles) {
    Float8 lowest = tile.x[0], highest = tile.x[0];
    for (int l = 1; l < kLength; ++l) {
      lowest = min(lowest, tile.x[l]);
      highest = max(highest, tile.x[l]);
    }
    above = std::max(above, largest(lowest));
    below = std::max(below, largest(-highest));
  }
  return above > below;
}

/// Integer scales and minima of eight sub-blocks, as floats.
struct Integers {
  Float8 scale = 0.0f, min = 0.0f;
};

/// Normal equations of d and dmin: sum p (x - d * scale * code + dmin * min)^2 at its least.
struct NormalEquations {
  float dd = 0, dm = 0, mm = 0, dx = 0, mx = 0;
};

inline Float8 affine_code(Float8 x, Float8 min, Float8 inverse_scale, float top) {
  return round_clamped((x + min) * inverse_scale, 0.0f, top);
}

/// Moves every lane to the best of itself and its eight neighbours; returns the lanes' errors.
template <int kLength>
Float8 step_to_best_neighbour(const Tile<kLength>& tile, float d, float dmin, const AffineSearch& search,
                              Integers& integers) {
  const Integers centre = integers;
  Float8 least = 3e38f;
  for (int neighbour = 0; neighbour < 9; ++neighbour) {
    const int scale_move = neighbour % 3 - 1, min_move = neighbour / 3 - 1;
    const Float8 scale = max(0.0f, min(search.levels, centre.scale + float(scale_move)));
    const Float8 minimum = max(0.0f, min(search.levels, centre.min + float(min_move)));
    const Float8 s = scale * d, m = minimum * dmin, inverse = invert(s);
    Float8 error = 0.0f;
    for (int l = 0; l < kLength; ++l) {
      const Float8 r = tile.x[l] + m - s * affine_code(tile.x[l], m, inverse, search.top);
      error += tile.p[l] * r * r;
    }
    integers.scale = select_less(error, least, scale, integers.scale);
    integers.min = select_less(error, least, minimum, integers.min);
    least = min(least, error);
  }
  return least;
}

template <int kLength>
void add_equations(const Tile<kLength>& tile, float d, float dmin, float top, const Integers& integers,
                   NormalEquations& out) {
  const Float8 m = integers.min * dmin, inverse = invert(integers.scale * d);
  Float8 p = 0.0f, x = 0.0f, q = 0.0f, qq = 0.0f, qx = 0.0f;
  for (int l = 0; l < kLength; ++l) {
    const Float8 code = affine_code(tile.x[l], m, inverse, top), pq = tile.p[l] * code;
    p += tile.p[l];
    x += tile.p[l] * tile.x[l];
    q += pq;
    qq += pq * code;
    qx += pq * tile.x[l];
  }
  out.dd += sum(integers.scale * integers.scale * qq);
  out.dm += sum(-integers.scale * integers.min * q);
  out.mm += sum(integers.min * integers.min * p);
  out.dx += sum(integers.scale * qx);
  out.mx += sum(-integers.min * x);
}

/// Moves every lane's integer scale to the best of itself and its two neighbours; returns the lanes' errors.
template <int kLength>
Float8 step_to_best_neighbour(const Tile<kLength>& tile, float d, const SymmetricSearch& search, Float8& integer) {
  const Float8 centre = integer;
  Float8 least = 3e38f;
  for (int neighbour = -1; neighbour <= 1; ++neighbour) {
    const Float8 scale = max(search.scale_lowest, min(search.scale_highest, centre + float(neighbour)));
    const Float8 s = scale * d, inverse = invert(s);
    Float8 error = 0.0f;
    for (int l = 0; l < kLength; ++l) {
      const Float8 r = tile.x[l] - s * round_clamped(tile.x[l] * inverse, search.lowest, search.highest);
      error += tile.p[l] * r * r;
    }
    integer = select_less(error, least, scale, integer);
    least = min(least, error);
  }
  return least;
}

}  // namespace superblock

/// w: [256], importance: [256] or empty.
template <int kLength>
AffineSuperblock<kLength> fit_affine_superblock(std::span<const float> w, std::span<const float> importance,
                                                const AffineSearch& search) {
  using namespace superblock;
  constexpr size_t kGroups = kSuperblock / kLength / 8;
  AffineSuperblock<kLength> out{};
  const float unit = magnitude(w);
  if (unit == 0) return out;
  std::array<Tile<kLength>, kGroups> tiles;
  load_tiles(w, importance, unit, tiles);
  const bool negate = lies_above_zero(std::span<const Tile<kLength>>(tiles));
  if (negate)
    for (Tile<kLength>& tile : tiles)
      for (Float8& x : tile.x) x = -x;

  std::array<Affine, kGroups> fit;
  float largest_scale = 0, largest_min = 0;
  for (size_t g = 0; g < kGroups; ++g) {
    fit[g] = fit_affine<true>(tiles[g], search.top, search.margins, search.fit_rounds);
    largest_scale = std::max(largest_scale, largest(fit[g].scale));
    largest_min = std::max(largest_min, largest(-fit[g].offset));
  }

  struct State {
    f16 d, dmin;
    std::array<Integers, kGroups> integers;
  };
  State state{scale_to_f16_upwards(largest_scale / search.levels * unit),
              scale_to_f16_upwards(largest_min / search.levels * unit),
              {}};
  for (size_t g = 0; g < kGroups; ++g) {
    const float d = to_float(state.d) / unit, dmin = to_float(state.dmin) / unit;
    state.integers[g].scale = round_clamped(fit[g].scale * (d > 0 ? 1.0f / d : 0.0f), 0.0f, search.levels);
    state.integers[g].min = round_clamped(-fit[g].offset * (dmin > 0 ? 1.0f / dmin : 0.0f), 0.0f, search.levels);
  }

  State best = state;
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < search.rounds; ++i) {
    const float d = to_float(state.d) / unit, dmin = to_float(state.dmin) / unit;
    float error = 0;
    NormalEquations eq;
    for (size_t g = 0; g < kGroups; ++g) {
      error += sum(step_to_best_neighbour(tiles[g], d, dmin, search, state.integers[g]));
      add_equations(tiles[g], d, dmin, search.top, state.integers[g], eq);
    }
    if (error < least) {
      least = error;
      best = state;
    }
    const float determinant = eq.dd * eq.mm - eq.dm * eq.dm;
    if (determinant > 1e-6f * eq.dd * eq.mm) {
      state.d = scale_to_f16(std::max(0.0f, (eq.dx * eq.mm - eq.mx * eq.dm) / determinant * unit));
      state.dmin = scale_to_f16(std::max(0.0f, (eq.mx * eq.dd - eq.dx * eq.dm) / determinant * unit));
    } else if (eq.dd > 0) {
      state.d = scale_to_f16(std::max(0.0f, eq.dx / eq.dd * unit));
    } else {
      break;
    }
  }

  const uint16_t sign = negate ? 0x8000 : 0;
  out.d.bits = uint16_t(best.d.bits | sign);
  out.dmin.bits = uint16_t(best.dmin.bits | sign);
  for (size_t g = 0; g < kGroups; ++g) {
    const Integers& integers = best.integers[g];
    const Float8 m = integers.min * (to_float(best.dmin) / unit);
    const Float8 inverse = invert(integers.scale * (to_float(best.d) / unit));
    for (int l = 0; l < kLength; ++l) {
      const Float8 code = affine_code(tiles[g].x[l], m, inverse, search.top);
      for (int j = 0; j < 8; ++j) out.code[(8 * int(g) + j) * kLength + l] = uint8_t(code[j]);
    }
    for (int j = 0; j < 8; ++j) {
      out.scale[8 * int(g) + j] = uint8_t(integers.scale[j]);
      out.min[8 * int(g) + j] = uint8_t(integers.min[j]);
    }
  }
  return out;
}

/// w: [256], importance: [256] or empty.
template <int kLength>
SymmetricSuperblock<kLength> fit_symmetric_superblock(std::span<const float> w, std::span<const float> importance,
                                                      const SymmetricSearch& search) {
  using namespace superblock;
  constexpr size_t kGroups = kSuperblock / kLength / 8;
  SymmetricSuperblock<kLength> out{};
  const float unit = magnitude(w);
  if (unit == 0) return out;
  std::array<Tile<kLength>, kGroups> tiles;
  load_tiles(w, importance, unit, tiles);

  std::array<Float8, kGroups> fit;
  float lowest_fit = 0, highest_fit = 0;
  for (size_t g = 0; g < kGroups; ++g) {
    fit[g] = fit_symmetric(tiles[g], search.lowest, search.highest, search.candidates, search.fit_rounds);
    lowest_fit = std::min(lowest_fit, -largest(-fit[g]));
    highest_fit = std::max(highest_fit, largest(fit[g]));
  }

  struct State {
    f16 d;
    std::array<Float8, kGroups> integers;
  };
  // The extreme scale becomes `scale_lowest`, which reaches further than `scale_highest`.
  State state{scale_to_f16_upwards(std::max(highest_fit, -lowest_fit) / -search.scale_lowest * unit), {}};
  if (highest_fit > -lowest_fit) state.d.bits |= 0x8000u;
  for (size_t g = 0; g < kGroups; ++g) {
    const float d = to_float(state.d) / unit;
    state.integers[g] = round_clamped(fit[g] * (d != 0 ? 1.0f / d : 0.0f), search.scale_lowest, search.scale_highest);
  }

  State best = state;
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < search.rounds; ++i) {
    const float d = to_float(state.d) / unit;
    float error = 0, dd = 0, dx = 0;
    for (size_t g = 0; g < kGroups; ++g) {
      const Tile<kLength>& tile = tiles[g];
      Float8& integers = state.integers[g];
      error += sum(step_to_best_neighbour(tile, d, search, integers));
      const Float8 inverse = invert(integers * d);
      Float8 qq = 0.0f, qx = 0.0f;
      for (int l = 0; l < kLength; ++l) {
        const Float8 code = round_clamped(tile.x[l] * inverse, search.lowest, search.highest), pq = tile.p[l] * code;
        qq += pq * code;
        qx += pq * tile.x[l];
      }
      dd += sum(integers * integers * qq);
      dx += sum(integers * qx);
    }
    if (error < least) {
      least = error;
      best = state;
    }
    if (!(dd > 0)) break;
    state.d = scale_to_f16(dx / dd * unit);
  }

  out.d = best.d;
  for (size_t g = 0; g < kGroups; ++g) {
    const Float8 inverse = invert(best.integers[g] * (to_float(best.d) / unit));
    for (int l = 0; l < kLength; ++l) {
      const Float8 code = round_clamped(tiles[g].x[l] * inverse, search.lowest, search.highest);
      for (int j = 0; j < 8; ++j) out.code[(8 * int(g) + j) * kLength + l] = int8_t(code[j]);
    }
    for (int j = 0; j < 8; ++j) out.scale[8 * int(g) + j] = int8_t(best.integers[g][j]);
  }
  return out;
}

}  // namespace lacuna::layout
