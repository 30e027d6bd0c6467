// What every encoder must do: error bounds, degenerate blocks, importance; and the bytes of one block of each, frozen.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "layout/rows.h"

namespace lacuna::layout {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

class EncodeRow : public testing::TestWithParam<Id> {
 protected:
  const Layout& layout_ = get(GetParam());
  bool is_quantized() const { return layout_.block_cols > 1; }
};

INSTANTIATE_TEST_SUITE_P(All, EncodeRow,
                         testing::Values(Id::f32, Id::f16, Id::bf16, Id::q4_0, Id::q4_1, Id::q5_0, Id::q5_1, Id::q8_0,
                                         Id::q2_K, Id::q3_K, Id::q4_K, Id::q5_K, Id::q6_K),
                         [](const auto& test) { return std::string(get(test.param).name); });

/// What rounding to nearest leaves at most, per layout. Codes: `top` steps over the range of a sub-block (for symmetric
/// ones `top` steps over its largest magnitude, on the side that has fewer codes). Integer scales, 1 / levels of the
/// superblock's largest, are off by half a unit, which the largest code multiplies. An encoder that searches must not
/// leave a larger sum of squares than that.
struct Grid {
  int sub_block, top;
  bool affine;
  int levels;  // 0: no second level
};
const std::map<Id, Grid> kGrids = {
    {Id::q4_0, {32, 7, false, 0}},    {Id::q4_1, {32, 15, true, 0}},   {Id::q5_0, {32, 15, false, 0}},
    {Id::q5_1, {32, 31, true, 0}},    {Id::q8_0, {32, 127, false, 0}}, {Id::q2_K, {16, 3, true, 15}},
    {Id::q3_K, {16, 3, false, 31}},   {Id::q4_K, {32, 15, true, 63}},  {Id::q5_K, {32, 31, true, 63}},
    {Id::q6_K, {16, 31, false, 127}},
};

double rounding_bound(const Grid& grid, std::span<const float> block) {
  const size_t length = size_t(grid.sub_block);
  std::vector<double> step, floor;
  for (size_t k = 0; k < block.size(); k += length) {
    const auto [low, high] = std::ranges::minmax(block.subspan(k, length));
    // The K layouts keep minima below zero.
    const double bottom = grid.levels > 0 ? std::min(double(low), 0.0) : double(low);
    step.push_back(grid.affine ? (high - bottom) / grid.top
                               : double(std::max(std::abs(low), std::abs(high))) / grid.top);
    floor.push_back(grid.affine ? -bottom : 0.0);
  }
  double bound = 0;
  for (size_t s = 0; s < step.size(); ++s) {
    double error = step[s] / 2 + std::ldexp(double(grid.top) * step[s] + floor[s], -11);  // f16 scale and minimum
    if (grid.levels > 0) error += (grid.top * std::ranges::max(step) + std::ranges::max(floor)) / grid.levels / 2;
    bound += double(length) * error * error;
  }
  return bound;
}

TEST_P(EncodeRow, LeavesNoMoreThanRounding) {
  if (!is_quantized()) {
    const auto w = test_rows::bell(777, 1);
    const int bits = GetParam() == Id::f32 ? 24 : GetParam() == Id::f16 ? 11 : 8;
    const auto stored = test_rows::stored(layout_, w);
    for (size_t k = 0; k < w.size(); ++k)
      EXPECT_LE(std::abs(stored[k] - w[k]), bits == 24 ? 0.0 : std::ldexp(std::abs(w[k]), -bits) + 0x1p-25);
    return;
  }
  const size_t cols = size_t(layout_.block_cols);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    auto w = test_rows::bell(cols, seed);
    if (seed % 4 == 1) w[seed % cols] *= 20;                    // an outlier
    if (seed % 4 == 2) std::fill_n(w.begin(), cols / 2, 0.0f);  // half of it pruned
    if (seed % 4 == 3)
      for (float& value : w) value *= value * 50;  // one-sided, heavy
    const auto stored = test_rows::stored(layout_, w);
    EXPECT_LE(test_rows::squared_error(w, stored), rounding_bound(kGrids.at(GetParam()), w)) << "seed " << seed;
  }
}

// RECIPES 14 and 17, and DESIGN 3: what is pruned decodes to +0, not to -0 or NaN.
TEST_P(EncodeRow, ZeroStaysPositiveZero) {
  for (const float zero : {0.0f, 1e-40f, -1e-40f, 1e-38f}) {
    const std::vector<float> w(512, zero);
    const auto row = test_rows::encode(layout_, w);
    EXPECT_EQ(first_bad_row(layout_, {1, 512}, row), -1);
    for (const float value : test_rows::decode(layout_, row, 512)) {
      if (is_quantized() || zero == 0.0f)
        ASSERT_EQ(std::bit_cast<uint32_t>(value), 0u) << zero;
      else
        ASSERT_LE(std::abs(value), 1.01e-38f);
    }
  }
}

TEST_P(EncodeRow, ZeroGroupsStayZero) {
  auto w = test_rows::bell(512, 4);
  std::fill_n(w.begin() + 32, 32, 0.0f);
  std::fill_n(w.begin() + 256, 96, 0.0f);
  const auto stored = test_rows::stored(layout_, w);
  for (size_t k = 0; k < 512; ++k)
    if (w[k] == 0.0f && (k < 64 || k >= 256)) {
      EXPECT_EQ(stored[k], 0.0f) << k;
    }
}

// One scale and one code: exact but for the stored scale's rounding, 2^-11 of it or half of f16's smallest number,
// which scale and code multiply.
TEST_P(EncodeRow, ConstantRows) {
  double multiplier = 1;
  if (is_quantized()) {
    const Grid grid = kGrids.at(GetParam());
    if (!grid.affine) multiplier *= grid.top + 1;
    if (grid.levels > 0) multiplier *= grid.levels + 1;
  }
  const double relative = GetParam() == Id::bf16 ? 0x1p-8 : 0x1p-10;
  for (const float constant : {1.0f, -1.0f, 0.37f, -0.02f, 1000.0f, 60000.0f}) {
    const std::vector<float> w(512, constant);
    const auto stored = test_rows::stored(layout_, w);
    for (size_t k = 0; k < 512; ++k)
      ASSERT_NEAR(stored[k], constant, std::abs(constant) * relative + 0x1p-25 * multiplier) << k;
  }
}

// Sub-blocks wholly above zero, as in a norm's weights or a shifted embedding.
TEST_P(EncodeRow, OneSidedRows) {
  for (const float sign : {1.0f, -1.0f}) {
    auto w = test_rows::bell(512, 6);
    for (float& value : w) value = sign * (1.0f + value);  // 1 +- 0.02
    const double power = test_rows::squared_error(w, std::vector<float>(512));
    const double error = test_rows::squared_error(w, test_rows::stored(layout_, w));
    // Affine layouts spend their codes on the spread of 0.02, the others on the whole magnitude.
    const bool affine = is_quantized() && kGrids.at(GetParam()).affine;
    EXPECT_LT(error, power * (affine ? 1e-4 : 4e-3)) << sign;
  }
}

TEST_P(EncodeRow, TinyAndHugeWeightsStayFinite) {
  for (const float size : {1e-44f, 1e-38f, 1e-30f, 1e-12f, 1e-7f, 1e-5f, 1e5f, 1e8f, 1e30f, 3.4e38f}) {
    auto w = test_rows::bell(512, 8);
    const float top = std::max(std::abs(*std::ranges::max_element(w)), std::abs(*std::ranges::min_element(w)));
    for (float& value : w) value = value / top * size;
    const auto row = test_rows::encode(layout_, w);
    EXPECT_EQ(first_bad_row(layout_, {1, 512}, row), -1) << size;
    const auto stored = test_rows::decode(layout_, row, 512);
    EXPECT_EQ(find_non_finite(stored), -1) << size;
    // Never worse than storing zeros: smaller than f16 can say becomes 0, larger saturates with the right sign.
    EXPECT_LE(test_rows::squared_error(w, stored), 1.0001 * test_rows::squared_error(w, std::vector<float>(512)))
        << size;
  }
}

TEST_P(EncodeRow, SubnormalScalesAreUsed) {
  auto w = test_rows::bell(512, 9);
  for (float& value : w) value *= 1e-3f;  // magnitudes up to 8e-5: the scales are subnormal f16
  const double power = test_rows::squared_error(w, std::vector<float>(512));
  const double error = test_rows::squared_error(w, test_rows::stored(layout_, w));
  EXPECT_LT(error, 0.1 * power);
}

// RECIPES 9.
TEST_P(EncodeRow, RefusesBadImportance) {
  const auto w = test_rows::bell(512, 10);
  std::vector<std::byte> row(size_t(layout_.row_bytes(512)));
  const auto encode = [&](std::span<const float> p) { return [&, p] { layout_.encode_row(layout_, w, p, row); }; };
  for (const float bad : {float(NAN), float(INFINITY), -1.0f}) {
    std::vector<float> p(512, 1.0f);
    p[300] = bad;
    EXPECT_THAT(encode(p), ThrowsMessage<Error>(HasSubstr("the importance of input 300 is")));
  }
  EXPECT_THAT(encode(std::vector<float>(511, 1.0f)),
              ThrowsMessage<Error>(HasSubstr("511 importances for a row of 512")));
}

TEST_P(EncodeRow, ZeroImportanceCountsAsEqual) {
  const auto w = test_rows::bell(512, 11);
  const auto plain = test_rows::encode(layout_, w);
  for (const float equal : {0.0f, 1e-40f, 1.0f, 1e-38f, 1e30f})
    EXPECT_EQ(test_rows::encode(layout_, w, std::vector<float>(512, equal)), plain) << equal;
  // Zero over the second superblock only.
  auto p = test_rows::importance(512, 12);
  std::fill_n(p.begin() + 256, 256, 0.0f);
  const auto mixed = test_rows::encode(layout_, w, p);
  EXPECT_TRUE(std::equal(plain.begin() + ptrdiff_t(plain.size() / 2), plain.end(),
                         mixed.begin() + ptrdiff_t(plain.size() / 2)));
  // A single input that matters: its own error all but vanishes, the others stay in reach.
  std::fill_n(p.begin(), 512, 0.0f);
  p[5] = 1e-3f;
  const auto stored = test_rows::stored(layout_, w, p);
  EXPECT_EQ(find_non_finite(stored), -1);
  EXPECT_LT(test_rows::squared_error(w, stored), 0.5 * test_rows::squared_error(w, std::vector<float>(512)));
}

TEST_P(EncodeRow, ImportanceLowersTheWeightedError) {
  const auto w = test_rows::bell(4096, 13), p = test_rows::importance(4096, 14);
  const double with = test_rows::squared_error(w, test_rows::stored(layout_, w, p), p);
  const double without = test_rows::squared_error(w, test_rows::stored(layout_, w), p);
  if (is_quantized()) {
    EXPECT_LT(with, 0.95 * without);
  } else {
    EXPECT_EQ(with, without);
  }
}

TEST_P(EncodeRow, BytesMatchGolden) {
  static const std::map<Id, std::string> kGolden = {
#include "layout/golden.inc"
  };
  const size_t cols = size_t(std::max<int64_t>(layout_.block_cols, 4));
  auto w = test_rows::bell(cols, 2026);
  w[1] = 0.0f;
  std::string hex;
  for (const std::byte byte : test_rows::encode(layout_, w, test_rows::importance(cols, 2027)))
    hex += fmt::format("{:02x}", unsigned(byte));
  EXPECT_EQ(hex, kGolden.at(GetParam()));
}

}  // namespace
}  // namespace lacuna::layout
