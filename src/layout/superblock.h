// src/layout/superblock.h - the second level of the K layouts: integer scales of the sub-blocks under one f16 scale.
//
// After every sub-block has its own best scale (fit.h), the scales are rounded to integers times d (and the minima to
// integers times dmin). Then, in turn: each sub-block tries its neighbouring integers with codes rounded anew; d and
// dmin follow by least squares over the superblock. The best of all states is kept, so no step can make it worse.
#pragma once

#include <array>
#include <cstdint>
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

template <int kGroups, int kLength>
void load_tiles(std::span<const float> w, std::span<const float> importance, float unit,
                std::array<Tile<kLength>, kGroups>& tiles) {
  const ImportanceScale scale(importance);
  for (int s = 0; s < 8 * kGroups; ++s)
    load_lane(tiles[size_t(s / 8)], s % 8, w.data() + s * kLength, unit,
              importance.empty() ? nullptr : importance.data() + s * kLength, scale);
}

struct AffineSearch {
  float top;                       // largest code
  float levels;                    // largest integer scale and min
  std::span<const float> margins;  // see fit_affine
  int fit_rounds;
  int rounds;  // of neighbours and least squares
};

/// w: [256], importance: [256] or empty.
template <int kLength>
AffineSuperblock<kLength> fit_affine_superblock(std::span<const float> w, std::span<const float> importance,
                                                const AffineSearch& search) {
  constexpr int kGroups = kSuperblock / kLength / 8;
  AffineSuperblock<kLength> out{};
  float unit = magnitude(w);
  if (unit == 0) return out;
  std::array<Tile<kLength>, kGroups> tiles;
  load_tiles<kGroups>(w, importance, unit, tiles);

  // Minima are stored as magnitudes below zero. Where a sub-block lies wholly above zero and none (or a lesser one)
  // wholly below, the negated superblock is fitted instead and d and dmin become negative.
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
  const bool negate = above > below;
  if (negate) {
    unit = -unit;
    for (Tile<kLength>& tile : tiles)
      for (Float8& x : tile.x) x = -x;
  }

  std::array<Affine, kGroups> fit;
  float largest_scale = 0, largest_min = 0;
  for (int g = 0; g < kGroups; ++g) {
    fit[g] = fit_affine<true>(tiles[g], search.top, search.margins, search.fit_rounds);
    largest_scale = std::max(largest_scale, largest(fit[g].scale));
    largest_min = std::max(largest_min, largest(-fit[g].offset));
  }
  const float size = std::abs(unit);
  f16 d = scale_to_f16_upwards(largest_scale / search.levels * size);
  f16 dmin = scale_to_f16_upwards(largest_min / search.levels * size);

  struct State {
    Float8 scale = 0.0f, min = 0.0f;
  };
  std::array<State, kGroups> state{}, best_state{};
  f16 best_d{}, best_dmin{};
  float best_error = std::numeric_limits<float>::infinity();
  for (int round_index = 0; round_index < search.rounds; ++round_index) {
    const float step = to_float(d) / size, min_step = to_float(dmin) / size;
    const float inverse_step = step > 0 ? 1.0f / step : 0.0f, inverse_min_step = min_step > 0 ? 1.0f / min_step : 0.0f;
    float error = 0, a11 = 0, a12 = 0, a22 = 0, b1 = 0, b2 = 0;
    for (int g = 0; g < kGroups; ++g) {
      const Tile<kLength>& tile = tiles[g];
      if (round_index == 0)
        state[g] = {round_clamped(fit[g].scale * inverse_step, 0.0f, search.levels),
                    round_clamped(-fit[g].offset * inverse_min_step, 0.0f, search.levels)};
      const State centre = state[g];
      Float8 group_error = 3e38f;
      for (int neighbour = 0; neighbour < 9; ++neighbour) {
        const Float8 scale = max(0.0f, min(search.levels, centre.scale + float(neighbour % 3 - 1)));
        const Float8 minimum = max(0.0f, min(search.levels, centre.min + float(neighbour / 3 - 1)));
        const Float8 s = scale * step, m = minimum * min_step, inverse = divide_or_zero(1.0f, s);
        Float8 candidate_error = 0.0f;
        for (int l = 0; l < kLength; ++l) {
          const Float8 shifted = tile.x[l] + m;
          const Float8 r = shifted - s * round_clamped(shifted * inverse, 0.0f, search.top);
          candidate_error += tile.p[l] * r * r;
        }
        state[g].scale = select_less(candidate_error, group_error, scale, state[g].scale);
        state[g].min = select_less(candidate_error, group_error, minimum, state[g].min);
        group_error = min(group_error, candidate_error);
      }
      error += sum(group_error);
      const Float8 s = state[g].scale * step, m = state[g].min * min_step, inverse = divide_or_zero(1.0f, s);
      Float8 p = 0.0f, x = 0.0f, q = 0.0f, qq = 0.0f, qx = 0.0f;
      for (int l = 0; l < kLength; ++l) {
        const Float8 code = round_clamped((tile.x[l] + m) * inverse, 0.0f, search.top), pq = tile.p[l] * code;
        p += tile.p[l];
        x += tile.p[l] * tile.x[l];
        q += pq;
        qq += pq * code;
        qx += pq * tile.x[l];
      }
      a11 += sum(state[g].scale * state[g].scale * qq);
      a12 += sum(-state[g].scale * state[g].min * q);
      a22 += sum(state[g].min * state[g].min * p);
      b1 += sum(state[g].scale * qx);
      b2 += sum(-state[g].min * x);
    }
    if (error < best_error) {
      best_error = error;
      best_state = state;
      best_d = d;
      best_dmin = dmin;
    }
    const float determinant = a11 * a22 - a12 * a12;
    if (determinant > 1e-6f * a11 * a22) {
      d = scale_to_f16(std::max(0.0f, (b1 * a22 - b2 * a12) / determinant * size));
      dmin = scale_to_f16(std::max(0.0f, (b2 * a11 - b1 * a12) / determinant * size));
    } else if (a11 > 0) {
      d = scale_to_f16(std::max(0.0f, b1 / a11 * size));
    } else {
      break;
    }
  }

  const float step = to_float(best_d) / size, min_step = to_float(best_dmin) / size;
  for (int g = 0; g < kGroups; ++g) {
    const Float8 s = best_state[g].scale * step, m = best_state[g].min * min_step, inverse = divide_or_zero(1.0f, s);
    for (int l = 0; l < kLength; ++l) {
      const Float8 code = round_clamped((tiles[g].x[l] + m) * inverse, 0.0f, search.top);
      for (int j = 0; j < 8; ++j) out.code[(8 * g + j) * kLength + l] = uint8_t(code[j]);
    }
    for (int j = 0; j < 8; ++j) {
      out.scale[8 * g + j] = uint8_t(best_state[g].scale[j]);
      out.min[8 * g + j] = uint8_t(best_state[g].min[j]);
    }
  }
  const uint16_t sign = negate ? 0x8000u : 0u;
  out.d.bits = uint16_t(best_d.bits | sign);
  out.dmin.bits = uint16_t(best_dmin.bits | sign);
  return out;
}

struct SymmetricSearch {
  float lowest, highest;              // code
  float scale_lowest, scale_highest;  // integer scale
  std::span<const float> candidates;  // see fit_symmetric
  int fit_rounds;
  int rounds;
};

template <int kLength>
SymmetricSuperblock<kLength> fit_symmetric_superblock(std::span<const float> w, std::span<const float> importance,
                                                      const SymmetricSearch& search) {
  constexpr int kGroups = kSuperblock / kLength / 8;
  SymmetricSuperblock<kLength> out{};
  const float unit = magnitude(w);
  if (unit == 0) return out;
  std::array<Tile<kLength>, kGroups> tiles;
  load_tiles<kGroups>(w, importance, unit, tiles);

  std::array<Float8, kGroups> fit;
  float lowest_fit = 0, highest_fit = 0;
  for (int g = 0; g < kGroups; ++g) {
    fit[g] = fit_symmetric(tiles[g], search.lowest, search.highest, search.candidates, search.fit_rounds);
    lowest_fit = std::min(lowest_fit, -largest(-fit[g]));
    highest_fit = std::max(highest_fit, largest(fit[g]));
  }
  // The extreme scale becomes `scale_lowest`, which reaches further than `scale_highest`.
  const bool positive = highest_fit > -lowest_fit;
  f16 d = scale_to_f16_upwards(std::max(highest_fit, -lowest_fit) / -search.scale_lowest * unit);
  if (positive) d.bits |= 0x8000u;

  std::array<Float8, kGroups> state{}, best_state{};
  f16 best_d{};
  float best_error = std::numeric_limits<float>::infinity();
  for (int round_index = 0; round_index < search.rounds; ++round_index) {
    const float step = to_float(d) / unit, inverse_step = step != 0 ? 1.0f / step : 0.0f;
    float error = 0, a = 0, b = 0;
    for (int g = 0; g < kGroups; ++g) {
      const Tile<kLength>& tile = tiles[g];
      if (round_index == 0) state[g] = round_clamped(fit[g] * inverse_step, search.scale_lowest, search.scale_highest);
      const Float8 centre = state[g];
      Float8 group_error = 3e38f;
      for (int neighbour = -1; neighbour <= 1; ++neighbour) {
        const Float8 scale = max(search.scale_lowest, min(search.scale_highest, centre + float(neighbour)));
        const Float8 s = scale * step, inverse = divide_or_zero(1.0f, abs(s)) * select_less(s, 0.0f, -1.0f, 1.0f);
        Float8 candidate_error = 0.0f;
        for (int l = 0; l < kLength; ++l) {
          const Float8 r = tile.x[l] - s * round_clamped(tile.x[l] * inverse, search.lowest, search.highest);
          candidate_error += tile.p[l] * r * r;
        }
        state[g] = select_less(candidate_error, group_error, scale, state[g]);
        group_error = min(group_error, candidate_error);
      }
      error += sum(group_error);
      const Float8 s = state[g] * step, inverse = divide_or_zero(1.0f, abs(s)) * select_less(s, 0.0f, -1.0f, 1.0f);
      Float8 qq = 0.0f, qx = 0.0f;
      for (int l = 0; l < kLength; ++l) {
        const Float8 code = round_clamped(tile.x[l] * inverse, search.lowest, search.highest), pq = tile.p[l] * code;
        qq += pq * code;
        qx += pq * tile.x[l];
      }
      a += sum(state[g] * state[g] * qq);
      b += sum(state[g] * qx);
    }
    if (error < best_error) {
      best_error = error;
      best_state = state;
      best_d = d;
    }
    if (!(a > 0)) break;
    d = scale_to_f16(b / a * unit);
  }

  const float step = to_float(best_d) / unit;
  for (int g = 0; g < kGroups; ++g) {
    const Float8 s = best_state[g] * step, inverse = divide_or_zero(1.0f, abs(s)) * select_less(s, 0.0f, -1.0f, 1.0f);
    for (int l = 0; l < kLength; ++l) {
      const Float8 code = round_clamped(tiles[g].x[l] * inverse, search.lowest, search.highest);
      for (int j = 0; j < 8; ++j) out.code[(8 * g + j) * kLength + l] = int8_t(code[j]);
    }
    for (int j = 0; j < 8; ++j) out.scale[8 * g + j] = int8_t(best_state[g][j]);
  }
  out.d = best_d;
  return out;
}

}  // namespace lacuna::layout
