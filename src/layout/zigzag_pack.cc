#include "layout/zigzag_pack.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "core/error.h"
#include "layout/q2_K.h"
#include "layout/q3_K.h"
#include "layout/q4_K.h"
#include "layout/q5_K.h"
#include "layout/q6_K.h"
#include "layout/q8_0.h"
#include "layout/superblock.h"
#include "layout/zigzag.h"

namespace lacuna::layout {

namespace {

/// What a layout's superblock holds.
struct Range {
  int group, lowest, highest;  // code
  int scale_lowest, scale_highest;
  bool mins;
};

constexpr int kMostGroups = 16;

/// One superblock's part of ZigzagCodes; outputs from N on are zeros.
struct Column {
  std::array<int8_t, kSuperRows> code{};
  std::array<float, kMostGroups> scale{}, min{};
};

struct Integers {
  f16 unit{};
  std::array<int, kMostGroups> value{};
};

/// Integers in lowest..highest and a unit for which sum weight (value - unit * integer)^2 is least, see pack_zigzag.
Integers fit_integers(std::span<const float> values, std::span<const float> weights, int lowest, int highest) {
  float extreme = 0;
  for (const float value : values)
    if (std::abs(value) > std::abs(extreme)) extreme = value;
  Integers best, tried;
  if (extreme == 0) return best;
  double least = std::numeric_limits<double>::infinity();
  const auto try_divisor = [&](int divisor) {
    tried.unit = scale_to_f16(extreme / float(divisor));
    const float unit = to_float(tried.unit);
    double error = 0;
    for (size_t g = 0; g < values.size(); ++g) {
      const float nearest = unit == 0 ? 0.0f : std::nearbyint(values[g] / unit);
      tried.value[g] = int(std::clamp(nearest, float(lowest), float(highest)));
      const double rest = double(values[g]) - double(unit) * tried.value[g];
      error += double(weights[g]) * rest * rest;
    }
    if (error < least) {
      least = error;
      best = tried;
    }
  };
  // From the end of the range that reaches furthest: without any preference the widest range is taken.
  for (int divisor = lowest; divisor < lowest / 2; ++divisor) try_divisor(divisor);
  for (int divisor = highest; divisor > highest / 2; --divisor) try_divisor(divisor);
  return best;
}

Column load_column(const Layout& layout, const Range& range, Shape shape, int64_t r, int64_t k,
                   const ZigzagCodes& codes) {
  Column out;
  const int64_t row0 = r * kSuperRows, rows = std::min(kSuperRows, shape.N - row0);
  const int64_t groups = (rows + range.group - 1) / range.group;
  float lowest_min = 0, highest_min = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = (row0 / range.group + g) * shape.K + k;
    const float scale = codes.scale[size_t(at)], min = range.mins ? codes.min[size_t(at)] : 0.0f;
    const float limit = 65504.0f * float(range.scale_highest > 0 ? range.scale_highest : 1);
    const auto refuse = [&](const char* what, float value, const char* expected) {
      throw Error("the {} of outputs {} to {}, input {}, is {}, but {} needs {}", what, row0 + g * range.group,
                  std::min(row0 + (g + 1) * range.group, shape.N) - 1, k, value, layout.name, expected);
    };
    if (!(std::abs(scale) <= limit)) refuse("scale", scale, "finite ones that f16 can hold");
    if (!(std::abs(min) <= limit)) refuse("min", min, "finite ones that f16 can hold");
    if (range.mins && scale < 0) refuse("scale", scale, "scales >= 0");
    lowest_min = std::min(lowest_min, min);
    highest_min = std::max(highest_min, min);
    if (lowest_min < 0 && highest_min > 0)
      refuse("min", min,
             "mins of one sign within a superblock (another of it has the other): let each group's range "
             "include zero");
    out.scale[size_t(g)] = scale;
    out.min[size_t(g)] = min;
  }
  for (int64_t n = 0; n < rows; ++n) {
    const int8_t code = codes.code[size_t((row0 + n) * shape.K + k)];
    if (code < range.lowest || code > range.highest)
      throw Error("the code of output {}, input {}, is {}, but {} needs {} to {}", row0 + n, k, code, layout.name,
                  range.lowest, range.highest);
    out.code[size_t(n)] = code;
  }
  return out;
}

Integers fit_scales(const Range& range, const Column& column) {
  const size_t groups = size_t(kSuperRows / range.group);
  std::array<float, kMostGroups> weights{};
  for (size_t n = 0; n < size_t(kSuperRows); ++n)
    weights[n / size_t(range.group)] += float(column.code[n]) * float(column.code[n]);
  return fit_integers(std::span(column.scale).first(groups), std::span(weights).first(groups), range.scale_lowest,
                      range.scale_highest);
}

template <class Block, int kLength>
void store_affine(const Range& range, const Column& column, std::byte* out) {
  constexpr size_t kGroups = size_t(kSuperRows) / kLength;
  const Integers scales = fit_scales(range, column);
  std::array<float, kGroups> equal;
  equal.fill(1.0f);
  // The unit takes the sign that the mins share.
  std::array<float, kGroups> magnitudes;
  bool negative = false;
  for (size_t g = 0; g < kGroups; ++g) {
    magnitudes[g] = std::abs(column.min[g]);
    negative |= column.min[g] < 0;
  }
  const Integers mins = fit_integers(magnitudes, equal, 0, range.scale_highest);
  AffineSuperblock<kLength> fit{};
  fit.d = scales.unit;
  fit.dmin = mins.unit;
  if (negative) fit.dmin.bits |= 0x8000u;
  for (size_t g = 0; g < kGroups; ++g) {
    fit.scale[g] = uint8_t(scales.value[g]);
    fit.min[g] = uint8_t(mins.value[g]);
  }
  for (size_t n = 0; n < size_t(kSuperRows); ++n) fit.code[n] = uint8_t(column.code[n]);
  Block block;
  pack_block(fit, block);
  std::memcpy(out, &block, sizeof(block));
}

template <class Block>
void store_symmetric(const Range& range, const Column& column, std::byte* out) {
  const Integers scales = fit_scales(range, column);
  SymmetricSuperblock<16> fit{};
  fit.d = scales.unit;
  for (size_t g = 0; g < kMostGroups; ++g) fit.scale[g] = int8_t(scales.value[g]);
  for (size_t n = 0; n < size_t(kSuperRows); ++n) fit.code[n] = column.code[n];
  Block block;
  pack_block(fit, block);
  std::memcpy(out, &block, sizeof(block));
}

void store_q8_0(const Range&, const Column& column, std::byte* out) {
  std::array<Q8_0Block, 8> blocks;
  for (size_t g = 0; g < blocks.size(); ++g) {
    blocks[g].scale = scale_to_f16(column.scale[g]);
    for (size_t l = 0; l < 32; ++l) blocks[g].code[l] = column.code[32 * g + l];
  }
  std::memcpy(out, blocks.data(), sizeof(blocks));
}

/// How the codes of each zigzag layout become a superblock.
struct Packing {
  Id id;
  Range range;
  void (*store)(const Range&, const Column&, std::byte* out);
};
constexpr Packing kPackings[] = {
    {Id::zz2_k, {16, 0, 3, 0, 15, true}, store_affine<Q2KBlock, 16>},
    {Id::zz3_k, {16, -4, 3, -32, 31, false}, store_symmetric<Q3KBlock>},
    {Id::zz4_k, {32, 0, 15, 0, 63, true}, store_affine<Q4KBlock, 32>},
    {Id::zz5_k, {32, 0, 31, 0, 63, true}, store_affine<Q5KBlock, 32>},
    {Id::zz6_k, {16, -32, 31, -128, 127, false}, store_symmetric<Q6KBlock>},
    {Id::zz8, {32, -127, 127, 0, 0, false}, store_q8_0},
};

const Packing& packing_of(const Layout& layout) {
  const auto* const found = std::ranges::find(kPackings, layout.id, &Packing::id);
  assert(found != std::end(kPackings));
  return *found;
}

}  // namespace

int64_t zigzag_group(const Layout& layout) { return packing_of(layout).range.group; }

void pack_zigzag(const Layout& layout, Shape shape, Params params, int64_t r, const ZigzagCodes& codes,
                 std::span<std::byte> out) {
  assert(layout.zigzag && int64_t(out.size()) == layout.size_bytes(shape));
  const auto& [id, range, store] = packing_of(layout);
  const int64_t groups = (shape.N + range.group - 1) / range.group;
  if (int64_t(codes.code.size()) != shape.N * shape.K || int64_t(codes.scale.size()) != groups * shape.K ||
      int64_t(codes.min.size()) != (range.mins ? groups * shape.K : 0))
    throw Error("[{}, {}] in {} takes {} codes, {} scales and {} mins, found {}, {} and {}", shape.N, shape.K,
                layout.name, shape.N * shape.K, groups * shape.K, range.mins ? groups * shape.K : 0, codes.code.size(),
                codes.scale.size(), codes.min.size());
  const ZigzagMap map(shape, params);
  assert(r >= 0 && r < map.rows);
  for (int64_t k = 0; k < shape.K; ++k) {
    store(range, load_column(layout, range, shape, r, k, codes), out.data() + map.index(r, k) * layout.block_bytes);
  }
}

}  // namespace lacuna::layout
