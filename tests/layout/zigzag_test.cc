#include "layout/zigzag.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "layout/rows.h"
#include "layout/zigzag_pack.h"

namespace lacuna::layout {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Id kZigzag[] = {Id::zz2_k, Id::zz3_k, Id::zz4_k, Id::zz5_k, Id::zz6_k, Id::zz8};

std::vector<std::byte> encode(const Layout& layout, Shape shape, Params params, std::span<const float> w) {
  std::vector<std::byte> out(size_t(layout.size_bytes(shape)), std::byte{0xee});
  for (int64_t r = super_rows(shape.N) - 1; r >= 0; --r)
    encode_zigzag(layout, shape, params, r, w.data() + r * kSuperRows * shape.K, {}, out);
  return out;
}

/// Column k of W as the row that its superblocks are blocks of: [super_rows * 256], zeros from N on.
std::vector<float> column(std::span<const float> w, Shape shape, int64_t k) {
  std::vector<float> out(size_t(super_rows(shape.N) * kSuperRows));
  for (int64_t n = 0; n < shape.N; ++n) out[size_t(n)] = w[size_t(n * shape.K + k)];
  return out;
}

/// Place of superblock (r, k), counted by walking the file.
int64_t walked_index(Shape shape, int64_t tile_rows, int64_t row, int64_t column) {
  const int64_t rows = super_rows(shape.N), tile = tile_rows == 0 ? rows : std::min(rows, tile_rows / kSuperRows);
  int64_t index = 0;
  for (int64_t first = 0; first < rows; first += tile)
    for (int64_t k = 0; k < shape.K; ++k)
      for (int64_t r = first; r < std::min(rows, first + tile); ++r, ++index)
        if (r == row && k == column) return index;
  return -1;
}

class Zigzag : public testing::TestWithParam<Id> {
 protected:
  const Layout& layout_ = get(GetParam());
  const Layout& superblock_ = row_layout(layout_);
};

TEST_P(Zigzag, TableRow) {
  EXPECT_TRUE(layout_.zigzag);
  EXPECT_EQ(layout_.ggml_type, -1);
  EXPECT_EQ(find(layout_.name), &layout_);
  EXPECT_EQ(layout_.bits_per_weight(), superblock_.bits_per_weight());
  EXPECT_EQ(layout_.size_bytes({257, 3}), 2 * 3 * superblock_.row_bytes(256));
  EXPECT_EQ(layout_.size_bytes({0, 3}), 0);
  EXPECT_THROW(layout_.size_bytes({-1, 3}), Error);
  EXPECT_THROW(layout_.size_bytes({int64_t{1} << 40, int64_t{1} << 40}), Error);
  EXPECT_THROW(layout_.size_bytes({std::numeric_limits<int64_t>::max(), 300}), Error);
}

// Every superblock is the K-quant block of its column, byte for byte, and lies where the header says.
TEST_P(Zigzag, SuperblocksAreBlocksOfTheTransposedMatrix) {
  for (const Shape shape : {Shape{1, 1}, {255, 5}, {256, 17}, {257, 33}, {1000, 3}}) {
    const auto w = test_rows::bell(size_t(shape.N * shape.K), uint64_t(shape.N));
    for (const int64_t tile_rows : {int64_t{0}, int64_t{256}, int64_t{512}, int64_t{768}, int64_t{1} << 40}) {
      const auto bytes = encode(layout_, shape, {tile_rows}, w);
      std::vector<float> decoded(w.size());
      decode_rows(layout_, shape, bytes, 0, shape.N, decoded.data(), {tile_rows});
      for (int64_t k = 0; k < shape.K; ++k) {
        const auto row = test_rows::encode(superblock_, column(w, shape, k));
        const auto stored = test_rows::decode(superblock_, row, size_t(super_rows(shape.N) * kSuperRows));
        for (int64_t r = 0; r < super_rows(shape.N); ++r) {
          const int64_t at = walked_index(shape, tile_rows, r, k);
          EXPECT_EQ(0, std::memcmp(bytes.data() + at * layout_.block_bytes, row.data() + r * layout_.block_bytes,
                                   size_t(layout_.block_bytes)))
              << "superblock row " << r << " column " << k << " tile_rows " << tile_rows;
        }
        for (int64_t n = 0; n < shape.N; ++n) EXPECT_EQ(decoded[size_t(n * shape.K + k)], stored[size_t(n)]);
      }
    }
  }
}

TEST_P(Zigzag, AnyRangeOfRowsAndColumns) {
  const Shape shape{700, 37};
  const Params params{512};
  const auto w = test_rows::bell(size_t(shape.N * shape.K), 7);
  const auto bytes = encode(layout_, shape, params, w);
  std::vector<float> all(w.size());
  decode_rows(layout_, shape, bytes, 0, shape.N, all.data(), params);
  for (const auto& [row0, rows, k0, cols] : {std::array<int64_t, 4>{0, 700, 5, 20},
                                             {250, 300, 0, 37},
                                             {699, 1, 36, 1},
                                             {255, 2, 15, 2},
                                             {512, 0, 0, 37},
                                             {3, 5, 7, 0}}) {
    std::vector<float> some(size_t(rows * cols));
    decode_zigzag_columns(layout_, shape, params, bytes, row0, rows, k0, cols, some.data());
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t k = 0; k < cols; ++k)
        ASSERT_EQ(some[size_t(n * cols + k)], all[size_t((row0 + n) * shape.K + k0 + k)]);
  }
  std::vector<float> one(256);
  decode_zigzag_superblock(layout_, shape, params, bytes, 2, 36, one.data());
  for (int64_t n = 0; n < 256; ++n)
    EXPECT_EQ(one[size_t(n)], 512 + n < shape.N ? all[size_t((512 + n) * shape.K + 36)] : 0.0f);
}

TEST_P(Zigzag, TileRowsAreAPermutation) {
  const Shape shape{1500, 19};
  const auto w = test_rows::bell(size_t(shape.N * shape.K), 8);
  const auto whole = encode(layout_, shape, {}, w);
  for (const int64_t tile_rows : {256, 512, 1024, 1536, 4096}) {
    const auto tiled = encode(layout_, shape, {tile_rows}, w);
    EXPECT_EQ(tiled == whole, tile_rows >= 1536);
    std::vector<std::byte> permuted(whole.size()), back(whole.size());
    permute_zigzag(layout_, shape, {}, whole, {tile_rows}, permuted);
    EXPECT_EQ(permuted, tiled);
    permute_zigzag(layout_, shape, {tile_rows}, permuted, {}, back);
    EXPECT_EQ(back, whole);
  }
}

TEST_P(Zigzag, FirstBadRowIsTheSuperblocksFirstOutput) {
  const Shape shape{1100, 4};
  const size_t scale_at = GetParam() == Id::zz2_k   ? 80
                          : GetParam() == Id::zz3_k ? 108
                          : GetParam() == Id::zz6_k ? 208
                                                    : 0;
  for (const Params params : {Params{0}, Params{256}, Params{512}}) {
    const ZigzagMap map(shape, params);
    for (int64_t r = 0; r < map.rows; ++r) {
      std::vector<std::byte> bytes(size_t(layout_.size_bytes(shape)), std::byte{0});
      EXPECT_EQ(first_bad_row(layout_, shape, bytes, params), -1);
      const uint16_t infinity = 0x7c00;
      std::memcpy(bytes.data() + size_t(map.index(r, 2) * layout_.block_bytes) + scale_at, &infinity, 2);
      EXPECT_EQ(first_bad_row(layout_, shape, bytes, params), 256 * r);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Zigzag, testing::ValuesIn(kZigzag),
                         [](const auto& id) { return std::string(get(id.param).name); });

TEST(ZigzagParams, MultiplesOf256) {
  for (const int64_t tile_rows : {int64_t{0}, int64_t{256}, int64_t{11008}, int64_t{1} << 40})
    EXPECT_NO_THROW(check_zigzag_params({tile_rows}));
  for (const int64_t tile_rows : {-256, -1, 1, 128, 300})
    EXPECT_THAT([=] { check_zigzag_params({tile_rows}); }, ThrowsMessage<Error>(HasSubstr("multiple of 256")));
}

TEST(EncodeZigzag, ImportanceIsOnePerInput) {
  const Layout& layout = get(Id::zz4_k);
  const Shape shape{3, 2};
  const auto w = test_rows::bell(6, 1);
  std::vector<std::byte> out(size_t(layout.size_bytes(shape)));
  const float importance[] = {1, 0, 2};
  EXPECT_NO_THROW(encode_zigzag(layout, shape, {}, 0, w.data(), std::span(importance).first(2), out));
  EXPECT_THROW(encode_zigzag(layout, shape, {}, 0, w.data(), importance, out), Error);
}

/// Squared error of a matrix in a layout over the bound that the acceptance asks for: that of the row layout.
double error_against_rows(const Layout& zigzag, Shape shape, std::span<const float> w, std::span<const float> p) {
  const Layout& rows = row_layout(zigzag);
  const auto bytes = encode(zigzag, shape, {}, w);
  std::vector<float> decoded(w.size());
  decode_rows(zigzag, shape, bytes, 0, shape.N, decoded.data());
  double ours = 0, theirs = 0;
  for (int64_t n = 0; n < shape.N; ++n) {
    const std::span<const float> row = w.subspan(size_t(n * shape.K), size_t(shape.K));
    ours += test_rows::squared_error(row, std::span(decoded).subspan(size_t(n * shape.K), size_t(shape.K)), p);
    theirs += test_rows::squared_error(row, test_rows::stored(rows, row), p);
  }
  return ours / theirs;
}

TEST_P(Zigzag, ErrsNoMoreThanTheRowLayoutOnNormalWeights) {
  const Shape shape{512, 512};
  const auto w = test_rows::bell(size_t(shape.N * shape.K), 77);
  const double unweighted = error_against_rows(layout_, shape, w, {});
  const double weighted = error_against_rows(layout_, shape, w, test_rows::importance(size_t(shape.K), 78));
  EXPECT_LE(unweighted, 1.02);
  EXPECT_LE(weighted, 1.02);
  EXPECT_GE(unweighted, 0.9) << "too good to be true";
  RecordProperty("unweighted", std::to_string(unweighted));
  RecordProperty("weighted", std::to_string(weighted));
}

/// Codes and groups such as a solver returns.
struct Solved {
  std::vector<int8_t> code;
  std::vector<float> scale, min;
  ZigzagCodes view() const { return {code, scale, min}; }
};

struct CodeRange {
  int lowest, highest, levels;  // levels: largest integer scale, 0: scales are f16
};

CodeRange code_range(Id id) {
  switch (id) {
    case Id::zz2_k:
      return {0, 3, 15};
    case Id::zz3_k:
      return {-4, 3, 32};
    case Id::zz4_k:
      return {0, 15, 63};
    case Id::zz5_k:
      return {0, 31, 63};
    case Id::zz6_k:
      return {-32, 31, 128};
    default:
      return {-127, 127, 0};
  }
}

bool has_mins(Id id) { return code_range(id).lowest == 0; }

Solved solve(const Layout& layout, Shape shape, uint64_t seed, double min_sign) {
  const CodeRange range = code_range(layout.id);
  const int64_t groups = (shape.N + zigzag_group(layout) - 1) / zigzag_group(layout);
  Rng rng(seed);
  Solved out;
  for (int64_t i = 0; i < shape.N * shape.K; ++i)
    out.code.push_back(int8_t(range.lowest + int(rng.below(uint64_t(range.highest - range.lowest + 1)))));
  for (int64_t i = 0; i < groups * shape.K; ++i) {
    out.scale.push_back(0.001f + 0.01f * float(rng.below(1000)) / 1000.0f);
    if (has_mins(layout.id)) out.min.push_back(float(min_sign * 0.05 * double(rng.below(1000)) / 1000.0));
  }
  return out;
}

// The error is what rounding scales to integers of one unit costs, superblock by superblock; where the scales are such
// integers already, nothing is lost.
TEST_P(Zigzag, PackKeepsCodesAndRoundsScales) {
  const Id id = GetParam();
  const int64_t group = zigzag_group(layout_);
  const CodeRange range = code_range(id);
  for (const Shape shape : {Shape{1, 1}, {257, 3}, {600, 5}}) {
    for (const double sign : {1.0, -1.0}) {
      const Params params{256};
      const Solved solved = solve(layout_, shape, uint64_t(shape.N), sign);
      std::vector<std::byte> bytes(size_t(layout_.size_bytes(shape)));
      for (int64_t r = 0; r < super_rows(shape.N); ++r) pack_zigzag(layout_, shape, params, r, solved.view(), bytes);
      std::vector<float> decoded(size_t(shape.N * shape.K));
      decode_rows(layout_, shape, bytes, 0, shape.N, decoded.data(), params);
      for (int64_t r = 0; r < super_rows(shape.N); ++r) {
        for (int64_t k = 0; k < shape.K; ++k) {
          const int64_t first = r * kSuperRows, last = std::min(shape.N, first + kSuperRows);
          double error = 0, code_squares = 0, most = 0, largest_scale = 0, largest_min = 0;
          for (int64_t n = first; n < last; ++n) {
            const int64_t at = n / group * shape.K + k;
            const double code = solved.code[size_t(n * shape.K + k)], scale = solved.scale[size_t(at)];
            const double min = has_mins(id) ? solved.min[size_t(at)] : 0.0;
            const double rest = scale * code - min - decoded[size_t(n * shape.K + k)];
            error += rest * rest;
            code_squares += code * code;
            most += 1;
            largest_scale = std::max(largest_scale, scale);
            largest_min = std::max(largest_min, std::abs(min));
          }
          // Half a unit, and the unit itself within 2^-11 of itself times the largest integer; the two errors add.
          const double half =
              range.levels == 0 ? largest_scale / 2048 : largest_scale / range.levels / 2 + largest_scale / 1024;
          const double half_min = range.levels == 0 ? 0.0 : largest_min / range.levels / 2 + largest_min / 1024;
          const double bound = std::sqrt(code_squares) * half + std::sqrt(most) * half_min + 1e-5;
          EXPECT_LE(std::sqrt(error), bound) << "superblock row " << r << " column " << k;
        }
      }
    }
  }
}

TEST_P(Zigzag, PackIsExactWhereTheScalesAreOnItsGrid) {
  const Id id = GetParam();
  const Shape shape{512, 4};
  Solved solved = solve(layout_, shape, 5, 1);
  const CodeRange range = code_range(id);
  const float unit = 0.0009765625f;  // 2^-10
  for (size_t i = 0; i < solved.scale.size(); ++i) {
    // The largest integer occurs in every superblock (groups of four columns lie side by side).
    const int levels = range.levels == 0 ? 100 : has_mins(id) ? range.levels : range.levels - 1;
    solved.scale[i] = unit * float(i / 4 % size_t(256 / zigzag_group(layout_)) == 0 ? levels : int(i % 7));
    if (has_mins(id))
      solved.min[i] = unit * float(i / 4 % size_t(256 / zigzag_group(layout_)) == 0 ? levels : int(i % 5));
  }
  std::vector<std::byte> bytes(size_t(layout_.size_bytes(shape)));
  for (int64_t r = 0; r < 2; ++r) pack_zigzag(layout_, shape, {}, r, solved.view(), bytes);
  std::vector<float> decoded(size_t(shape.N * shape.K));
  decode_rows(layout_, shape, bytes, 0, shape.N, decoded.data());
  for (int64_t n = 0; n < shape.N; ++n)
    for (int64_t k = 0; k < shape.K; ++k) {
      const size_t at = size_t(n / zigzag_group(layout_) * shape.K + k);
      const float expected =
          solved.scale[at] * float(solved.code[size_t(n * shape.K + k)]) - (has_mins(id) ? solved.min[at] : 0.0f);
      ASSERT_EQ(decoded[size_t(n * shape.K + k)], expected) << "output " << n << " input " << k;
    }
}

TEST_P(Zigzag, PackRefusesWhatTheLayoutCannotHold) {
  const Shape shape{40, 2};
  const Solved sound = solve(layout_, shape, 1, 1);
  std::vector<std::byte> bytes(size_t(layout_.size_bytes(shape)));
  const auto pack = [&](const Solved& solved) {
    return [&, solved] { pack_zigzag(layout_, shape, {}, 0, solved.view(), bytes); };
  };
  EXPECT_NO_THROW(pack(sound)());
  Solved bad = sound;
  bad.code[2 * 33 + 1] = GetParam() == Id::zz8 ? int8_t(-128) : int8_t(code_range(GetParam()).highest + 1);
  EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("output 33, input 1")));
  for (const float scale : {NAN, INFINITY, 1e10f}) {
    bad = sound;
    bad.scale[3] = scale;
    EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("input 1"))) << scale;
  }
  bad = sound;
  bad.scale.pop_back();
  EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("scales")));
  if (!has_mins(GetParam())) return;
  bad = sound;
  bad.scale[0] = -1;
  EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("scales >= 0")));
  bad = sound;
  bad.min[0] = 1;
  bad.min[2] = -1;
  EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("one sign")));
}

}  // namespace
}  // namespace lacuna::layout
