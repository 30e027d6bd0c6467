#include "layout/nm24_q4.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "core/error.h"

namespace lacuna::layout {

namespace {

constexpr int kZero = 8, kTopCode = 15;
constexpr float kLargestHalf = 65504;

int place_of(const Nm24Q4Block& block, int kept) { return block.index[kept / 4] >> (2 * (kept % 4)) & 3; }

}  // namespace

void encode_row(std::span<const float> w, std::span<const uint8_t> keep, std::span<Nm24Q4Block> out) {
  assert(w.size() == keep.size() && w.size() == 64 * out.size());
  std::vector<uint8_t> code(w.size());
  std::vector<float> scale(out.size());
  for (size_t b = 0; b < out.size(); ++b) {
    float least = 0, most = 0;
    for (size_t k = 64 * b; k < 64 * (b + 1); ++k) {
      if (keep[k] == 0) continue;
      least = std::min(least, w[k]);
      most = std::max(most, w[k]);
    }
    // The least scale that clips neither side.
    scale[b] =
        to_float(to_f16(std::min(kLargestHalf, std::max(most / float(kTopCode - kZero), least / float(-kZero)))));
    for (size_t k = 64 * b; k < 64 * (b + 1); ++k) {
      const float steps = scale[b] > 0 ? w[k] / scale[b] : 0.0f;
      code[k] = uint8_t(__builtin_nearbyintf(std::clamp(steps, float(-kZero), float(kTopCode - kZero))) + kZero);
    }
  }
  pack_row(code, scale, keep, out);
}

void pack_row(std::span<const uint8_t> code, std::span<const float> scale, std::span<const uint8_t> keep,
              std::span<Nm24Q4Block> out) {
  assert(code.size() == 64 * out.size() && keep.size() == code.size() && scale.size() == out.size());
  for (size_t b = 0; b < out.size(); ++b) {
    Nm24Q4Block block{};
    block.scale = to_f16(scale[b]);
    int kept = 0;
    for (size_t four = 0; four < 16; ++four) {
      const size_t k = 64 * b + 4 * four;
      const auto count = std::count_if(&keep[k], &keep[k] + 4, [](uint8_t kept_one) { return kept_one != 0; });
      if (count != 2)
        throw Error("the group of four at input {} keeps {} weights; nm24_q4 needs exactly 2 of every 4", k, count);
      for (size_t i = 0; i < 4; ++i) {
        if (keep[k + i] == 0) continue;
        block.index[kept / 4] = uint8_t(block.index[kept / 4] | i << (2 * (kept % 4)));
        block.code[kept / 2] = uint8_t(block.code[kept / 2] | (code[k + i] & kTopCode) << (4 * (kept % 2)));
        ++kept;
      }
    }
    out[b] = block;
  }
}

void decode_block(const Nm24Q4Block& block, float* w) {
  const float scale = to_float(block.scale);
  std::fill_n(w, 64, 0.0f);
  for (int i = 0; i < 32; ++i)
    w[4 * (i / 2) + place_of(block, i)] = scale * float((block.code[i / 2] >> (4 * (i % 2)) & kTopCode) - kZero);
}

void keep_two_of_four(std::span<const float> w, std::span<uint8_t> keep) {
  assert(w.size() == keep.size() && w.size() % 4 == 0);
  for (size_t k = 0; k < w.size(); k += 4) {
    int kept = 0;
    for (size_t i = k; i < k + 4; ++i) {
      keep[i] = w[i] != 0.0f;
      kept += keep[i];
    }
    if (kept > 2)
      throw Error("the group of four at input {} has {} weights that are not 0, but 2:4 allows two; prune it first", k,
                  kept);
    for (size_t i = k; i < k + 4 && kept < 2; ++i) {
      kept += keep[i] == 0;
      keep[i] = 1;
    }
  }
}

bool is_ascending(const Nm24Q4Block& block) {
  for (int i = 0; i < 32; i += 2)
    if (place_of(block, i) >= place_of(block, i + 1)) return false;
  return true;
}

}  // namespace lacuna::layout
