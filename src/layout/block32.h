// src/layout/block32.h - fits of up to eight blocks of 32 weights at once: q4_0, q4_1, q5_0, q5_1, q8_0.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <span>

#include "layout/fit.h"

namespace lacuna::layout {

struct Blocks32 {
  f16 scale[8], min[8];  // min: of affine fits
  int8_t code[8][32];
};

namespace block32 {

using Tile32 = Tile<32>;

/// Loads w.size() / 32 <= 8 blocks, the other lanes with zeros. unit: magnitude of each block.
inline void load(std::span<const float> w, std::span<const float> importance, Tile32& tile,
                 std::array<float, 8>& unit) {
  assert(w.size() % 32 == 0 && w.size() <= 256);
  constexpr float kZeros[32] = {};
  for (size_t j = 0; j < 8; ++j) {
    const bool exists = 32 * j < w.size();
    const std::span<const float> block = exists ? w.subspan(32 * j, 32) : std::span<const float>(kZeros);
    const std::span<const float> p =
        exists && !importance.empty() ? importance.subspan(32 * j, 32) : importance.first(0);
    unit[j] = magnitude(block);
    load_lane(tile, int(j), block.data(), unit[j], p.empty() ? nullptr : p.data(), ImportanceScale(p));
  }
}

/// Stores value[j] * unit[j] as f16, `ulps` units in the last place away from the nearest, and sets value[j] to what
/// was stored, over unit[j] again.
inline void store_scale(Float8& value, const std::array<float, 8>& unit, int ulps, f16* out) {
  for (int j = 0; j < 8; ++j) {
    out[j] = scale_to_f16(value[j] * unit[size_t(j)]);
    const int magnitude_bits = (out[j].bits & 0x7fff) + ulps;
    if (magnitude_bits >= 0 && magnitude_bits < 0x7c00) out[j].bits = uint16_t((out[j].bits & 0x8000) | magnitude_bits);
    value.set(j, unit[size_t(j)] > 0 ? to_float(out[j]) / unit[size_t(j)] : 0.0f);
  }
}

/// Stores code = nearest((x - offset) / scale) of the lanes, first for the scale nearest to the fit, then for the
/// neighbouring f16 where that is better: next to f16's smallest number, or when the last bit of scale matters.
inline void store(const Tile32& tile, const std::array<float, 8>& unit, Float8 scale, Float8 offset, float lowest,
                  float highest, Blocks32& out) {
  Float8 best_error = 3e38f;
  store_scale(offset, unit, 0, out.min);
  for (const int ulps : {0, 1, -1}) {
    f16 stored[8];
    Float8 s = scale, code[32], error = 0.0f;
    store_scale(s, unit, ulps, stored);
    const Float8 inverse = invert(s);
    for (int l = 0; l < 32; ++l) {
      const Float8 shifted = tile.x[l] - offset;
      code[l] = round_clamped(shifted * inverse, lowest, highest);
      const Float8 r = shifted - s * code[l];
      error += tile.p[l] * r * r;
    }
    for (int j = 0; j < 8; ++j) {
      if (!(error[j] < best_error[j])) continue;
      out.scale[j] = stored[j];
      for (int l = 0; l < 32; ++l) out.code[j][l] = int8_t(code[l][j]);
    }
    best_error = min(best_error, error);
  }
}

}  // namespace block32

/// weight ~ scale * code, code in lowest..highest. w: [32 * blocks], importance: the same or empty; see fit_symmetric.
inline Blocks32 fit_symmetric_blocks(std::span<const float> w, std::span<const float> importance, float lowest,
                                     float highest, std::span<const float> candidates, int rounds) {
  block32::Tile32 tile;
  std::array<float, 8> unit;
  Blocks32 out{};
  block32::load(w, importance, tile, unit);
  const Float8 scale = fit_symmetric(tile, lowest, highest, candidates, rounds);
  block32::store(tile, unit, scale, 0.0f, lowest, highest, out);
  return out;
}

/// weight ~ scale * code + min, code in 0..top; see fit_affine.
inline Blocks32 fit_affine_blocks(std::span<const float> w, std::span<const float> importance, float top,
                                  std::span<const float> margins, int rounds) {
  block32::Tile32 tile;
  std::array<float, 8> unit;
  Blocks32 out{};
  block32::load(w, importance, tile, unit);
  const Affine fit = fit_affine<false>(tile, top, margins, rounds);
  block32::store(tile, unit, fit.scale, fit.offset, 0.0f, top, out);
  return out;
}

}  // namespace lacuna::layout
