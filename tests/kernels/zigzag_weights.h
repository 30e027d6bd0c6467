// tests/kernels/zigzag_weights.h - zigzag weights and inputs of tests: random ones, or small whole numbers of which
// every sum is exact.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/linear.h"
#include "layout/layout.h"
#include "layout/q2_K.h"
#include "layout/q3_K.h"
#include "layout/q4_K.h"
#include "layout/q5_K.h"
#include "layout/q6_K.h"
#include "layout/q8_0.h"
#include "layout/six_bit.h"
#include "layout/zigzag.h"

namespace lacuna::test {

using kernels::WeightView;
using layout::Id;
using layout::Shape;

// ---- superblocks of each layout: random ones, or `integers`: of small whole numbers ----

struct Draw {
  Rng& rng;
  bool integers;

  f16 scale() const { return to_f16(integers ? 1.0f : float(rng.normal() * 0.01)); }
  uint8_t byte() const { return uint8_t(rng.next() >> 56); }
  /// A group's scale or min, of so many bits.
  uint8_t small_scale(int bits) const { return uint8_t(integers ? 1 + rng.below(2) : rng.below(uint64_t{1} << bits)); }
  uint8_t small_min(int bits) const {
    return uint8_t(integers ? rng.below(bits < 6 ? 3 : 4) : rng.below(uint64_t{1} << bits));
  }
  /// -2, -1, 1 or 2, or `bits` random ones.
  int signed_scale(int bits) const {
    if (integers) return int(1 + rng.below(2)) * (rng.below(2) == 0 ? -1 : 1);
    return int(rng.below(uint64_t{1} << bits)) - (1 << (bits - 1));
  }
};

inline void draw(const Draw& from, layout::Q2KBlock& block) {
  block.d = from.scale(), block.dmin = from.scale();
  for (uint8_t& byte : block.scale_min) byte = uint8_t(from.small_scale(4) | from.small_min(4) << 4);
  for (uint8_t& code : block.code) code = from.byte();
}
inline void draw(const Draw& from, layout::Q3KBlock& block) {
  block.d = from.scale();
  std::memset(block.scale, 0, sizeof(block.scale));
  for (int s = 0; s < 16; ++s) {
    const int bits = from.signed_scale(6) + 32;
    block.scale[s % 8] |= uint8_t((bits & 15) << (s / 8 * 4));
    block.scale[8 + s % 4] |= uint8_t((bits >> 4) << (s / 4 * 2));
  }
  for (uint8_t& code : block.low) code = from.byte();
  for (uint8_t& code : block.high) code = from.byte();
}
inline void draw_six_bit(const Draw& from, uint8_t* packed) {
  uint8_t scale[8], min[8];
  for (int g = 0; g < 8; ++g) scale[g] = from.small_scale(6), min[g] = from.small_min(6);
  layout::pack_six_bit(scale, min, packed);
}
inline void draw(const Draw& from, layout::Q4KBlock& block) {
  block.d = from.scale(), block.dmin = from.scale();
  draw_six_bit(from, block.scale_min);
  for (uint8_t& code : block.code) code = from.byte();
}
inline void draw(const Draw& from, layout::Q5KBlock& block) {
  block.d = from.scale(), block.dmin = from.scale();
  draw_six_bit(from, block.scale_min);
  for (uint8_t& code : block.low) code = from.byte();
  for (uint8_t& code : block.high) code = from.byte();
}
inline void draw(const Draw& from, layout::Q6KBlock& block) {
  block.d = from.scale();
  for (int8_t& scale : block.scale) scale = int8_t(from.signed_scale(8));
  for (uint8_t& code : block.low) code = from.byte();
  for (uint8_t& code : block.high) code = from.byte();
}
/// Whole numbers of eight bits whose sums of eight f16 holds: small ones in every other block, else multiples of 8.
inline void draw(const Draw& from, layout::Q8_0Block (&blocks)[8]) {
  for (int g = 0; g < 8; ++g) {
    blocks[g].scale = from.integers ? to_f16(float(from.small_scale(0))) : from.scale();
    for (int8_t& code : blocks[g].code) {
      code = int8_t(from.byte());
      if (from.integers) code = int8_t(g % 2 == 0 ? code % 32 : code & ~7);
    }
  }
}

struct Weight {
  std::vector<std::byte> bytes;
  std::vector<float> decoded;  // [N, K]
  WeightView view;
};

template <class Block>
inline void draw_all(const Draw& from, std::vector<std::byte>& bytes) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(Block)) {
    Block block;
    draw(from, block);
    std::memcpy(&bytes[at], &block, sizeof(Block));
  }
}

/// integers: weights are small whole numbers, so that with small whole inputs every sum is exact in f16 and f32.
inline Weight make_weight(Id id, Shape shape, int64_t tile_rows, uint64_t seed, bool integers) {
  const layout::Layout& l = layout::get(id);
  Weight w;
  w.bytes.resize(size_t(l.size_bytes(shape)));
  Rng rng(seed);
  const Draw from{rng, integers};
  if (id == Id::zz2_k) draw_all<layout::Q2KBlock>(from, w.bytes);
  if (id == Id::zz3_k) draw_all<layout::Q3KBlock>(from, w.bytes);
  if (id == Id::zz4_k) draw_all<layout::Q4KBlock>(from, w.bytes);
  if (id == Id::zz5_k) draw_all<layout::Q5KBlock>(from, w.bytes);
  if (id == Id::zz6_k) draw_all<layout::Q6KBlock>(from, w.bytes);
  if (id == Id::zz8) draw_all<layout::Q8_0Block[8]>(from, w.bytes);
  w.decoded.resize(size_t(shape.N * shape.K));
  layout::decode_zigzag(l, shape, {tile_rows}, w.bytes, 0, shape.N, w.decoded.data());
  w.view = {"w", &l, shape, w.bytes, {}, {tile_rows}};
  return w;
}

inline std::vector<float> whole_inputs(int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(static_cast<size_t>(K));
  for (float& value : x) value = float(int(rng.below(3)) - 1) * (rng.below(2) == 0 ? 1.0f : 2.0f);
  return x;
}

inline std::vector<float> random_inputs(int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(static_cast<size_t>(K));
  for (float& value : x) value = float(rng.normal());
  return x;
}

}  // namespace lacuna::test
