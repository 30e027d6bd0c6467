// cli/svg.h
#include "cli/svg.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

namespace lacuna::cli {
namespace {

using testing::HasSubstr;

std::vector<double> widths(const std::string& svg, const std::string& fill) {
  std::vector<double> out;
  const std::regex bar("width=\"([0-9.]+)\" height=\"[0-9.]+\" fill=\"" + fill + "\"");
  for (std::sregex_iterator at(svg.begin(), svg.end(), bar), end; at != end; ++at) out.push_back(std::stod((*at)[1]));
  return out;
}

TEST(Svg, BarsAreAsLongAsTheirValues) {
  const BarChart chart{"speed", "x", {"one", "two"}, {{"a & b", {1.0, 4.0}}, {"c", {2.0, std::nullopt}}}, 1.0};
  const std::string svg = draw({chart});
  EXPECT_THAT(svg, HasSubstr("a &amp; b"));
  EXPECT_THAT(svg, HasSubstr(">4 x<"));
  const std::vector<double> one = widths(svg, std::string(colour(0))), two = widths(svg, std::string(colour(1)));
  ASSERT_EQ(one.size(), 3u);  // the legend's square, then the bars
  ASSERT_EQ(two.size(), 2u);
  EXPECT_NEAR(one[2] / one[1], 2, 1e-3);
  EXPECT_NEAR(two[1] / one[1], 4, 1e-3);
  EXPECT_EQ(widths(svg, "#888888").size(), 1u);  // the line at 1
}

TEST(Svg, ChartsFollowOneAnother) {
  const BarChart chart{"a", "ms", {"s"}, {{"g", {1.0}}}, std::nullopt};
  const std::string one = draw({chart}), two = draw({chart, chart});
  const auto height = [](const std::string& svg) {
    std::smatch found;
    EXPECT_TRUE(std::regex_search(svg, found, std::regex("<svg [^>]*height=\"([0-9.]+)\"")));
    return std::stod(found[1]);
  };
  EXPECT_GT(height(two), 1.5 * height(one));
  EXPECT_TRUE(two.ends_with("</svg>\n"));
}

TEST(Svg, NothingToDraw) { EXPECT_THAT(draw({{"empty", "ms", {}, {}, {}}}), HasSubstr("empty")); }

}  // namespace
}  // namespace lacuna::cli
