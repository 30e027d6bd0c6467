// cli/salient.h
#include "cli/salient.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <vector>

namespace lacuna::cli {
namespace {

using testing::HasSubstr;

TEST(Salient, ClusteringCountsRunsThatHoldOne) {
  // 4 x 40, groups of 16: row 0 has all of its first group, row 2 one weight in its short last group.
  std::vector<uint8_t> top(4 * 40, 0);
  for (int k = 0; k < 16; ++k) top[size_t(k)] = 1;
  top[2 * 40 + 39] = 1;
  const Clustering got = clustering_of({"w", 4, 40, top, 16});
  EXPECT_DOUBLE_EQ(got.share, 17.0 / 160);
  EXPECT_DOUBLE_EQ(got.row_groups, 2.0 / 12);
  EXPECT_DOUBLE_EQ(got.column_groups, 17.0 / 40);
  EXPECT_DOUBLE_EQ(got.by_chance, 1 - std::pow(1 - 17.0 / 160, 16));
}

TEST(Salient, RowsAndColumnsAreEachOthersMirror) {
  std::vector<uint8_t> top(32 * 32, 0), turned(32 * 32, 0);
  for (size_t i = 0; i < 32; ++i) {
    top[i * 32 + 5] = 1;  // a column
    turned[5 * 32 + i] = 1;
  }
  const Clustering a = clustering_of({"w", 32, 32, top, 16}), b = clustering_of({"w", 32, 32, turned, 16});
  EXPECT_DOUBLE_EQ(a.row_groups, b.column_groups);
  EXPECT_DOUBLE_EQ(a.column_groups, b.row_groups);
  EXPECT_LT(a.column_groups, a.row_groups);
}

/// Squares of one weight: [column, row, width] of each run.
std::vector<std::array<double, 3>> runs(const std::string& svg, double size) {
  std::vector<std::array<double, 3>> out;
  const std::regex run("M([0-9.]+) ([0-9.]+)h([0-9.]+)v([0-9.]+)h-[0-9.]+z");
  for (std::sregex_iterator at(svg.begin(), svg.end(), run), end; at != end; ++at)
    if (std::stod((*at)[4]) == size) out.push_back({std::stod((*at)[1]), std::stod((*at)[2]), std::stod((*at)[3])});
  return out;
}

TEST(Salient, EveryWeightOfTheCornerIsWhereItBelongs) {
  std::vector<uint8_t> top(8 * 64, 0);
  for (const size_t k : {3, 4, 5, 20}) top[2 * 64 + k] = 1;
  top[7 * 64 + 63] = 1;
  const std::string svg = draw(SalientMap{"blk.0.attn_k.weight", 8, 64, top, 16});
  EXPECT_TRUE(svg.starts_with("<svg"));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("blk.0.attn_k.weight [8, 64]: the 0.977% of its weights"));
  EXPECT_THAT(svg, HasSubstr("9.38% of the groups of 16 along rows hold one of them, 7.81% of those along columns"));
  const auto found = runs(svg, 2);
  ASSERT_EQ(found.size(), 3u);  // three neighbours are one run
  EXPECT_DOUBLE_EQ(found[0][2], 3 * 2);
  EXPECT_DOUBLE_EQ(found[1][0] - found[0][0], 2 * (20 - 3));
  EXPECT_DOUBLE_EQ(found[1][1], found[0][1]);
  EXPECT_DOUBLE_EQ(found[2][1] - found[0][1], 2 * (7 - 2));
  EXPECT_DOUBLE_EQ(found[2][0] - found[0][0], 2 * (63 - 3));
}

TEST(Salient, ALargeMatrixIsDrawnInFewCells) {
  const int64_t N = 1000, K = 1200;
  std::vector<uint8_t> top(size_t(N * K), 0);
  for (int64_t n = 0; n < N; ++n) top[size_t(n * K + 600)] = 1;
  const std::string svg = draw(SalientMap{"w", N, K, top, 16});
  EXPECT_LT(svg.size(), 100000u);
  EXPECT_EQ(runs(svg, 3).size(), 64u);  // a cell in each of 64 rows of cells
  EXPECT_TRUE(runs(svg, 2).empty());    // the corner ends at column 384
}

}  // namespace
}  // namespace lacuna::cli
