#include "cli/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace lacuna::cli {
namespace {

constexpr double kLeft = 210, kBarsWidth = 520, kRight = 110, kBar = 11, kGap = 8, kMargin = 14, kLine = 16;

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else
      out += c;
  }
  return out;
}

/// Draws one chart from `top` on; returns where it ends.
double draw_chart(const BarChart& chart, double top, Svg& svg) {
  double most = chart.mark.value_or(0);
  for (const BarChart::Group& group : chart.groups)
    for (const std::optional<double>& value : group.values) most = std::max(most, value.value_or(0));
  const double scale = most > 0 ? kBarsWidth / most : 0;
  double y = top + kMargin + kLine;
  svg.text(kMargin, y, chart.title);
  y += kLine;
  double x = kMargin;
  for (size_t s = 0; s < chart.series.size(); ++s) {
    svg.rectangle(x, y - 9, 10, 10, colour(s));
    svg.text(x + 14, y, chart.series[s]);
    x += 30 + 7 * double(chart.series[s].size());
  }
  y += kGap;
  const double bars_top = y;
  for (const BarChart::Group& group : chart.groups) {
    svg.text(kLeft - 8, y + kBar, group.name, Svg::Anchor::end);
    for (size_t s = 0; s < group.values.size(); ++s) {
      if (!group.values[s]) continue;
      const double width = scale * *group.values[s];
      svg.rectangle(kLeft, y, width, kBar - 1, colour(s));
      svg.text(kLeft + width + 4, y + kBar - 2, fmt::format("{:.3g} {}", *group.values[s], chart.unit));
      y += kBar;
    }
    y += kGap;
  }
  if (chart.mark) svg.rectangle(kLeft + scale * *chart.mark, bars_top, 1, y - bars_top, "#888888");
  return y;
}

/// One axis: values to shares of its length.
struct Axis {
  double low = 0, high = 1;
  bool logarithmic = false;

  double share(double value) const {
    if (logarithmic) return (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
    return (value - low) / (high - low);
  }
  double at(double share) const {
    return logarithmic ? std::exp(std::log(low) + share * (std::log(high) - std::log(low)))
                       : low + share * (high - low);
  }
};

Axis axis_of(const PointChart& chart, bool vertical) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const PointChart::Series& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      low = std::min(low, vertical ? y : x);
      high = std::max(high, vertical ? y : x);
    }
  }
  Axis axis{low, high, vertical && low > 0 && high >= 8 * low};
  if (!axis.logarithmic && axis.low > 0 && axis.low < 0.5 * axis.high) axis.low = 0;
  if (!(axis.high > axis.low))
    axis.low -= 0.5 * std::max(1.0, std::abs(high)), axis.high += 0.5 * std::max(1.0, std::abs(high));
  return axis;
}

/// Draws one chart from `top` on; returns where it ends.
double draw_chart(const PointChart& chart, double top, Svg& svg) {
  constexpr double kAxisLeft = 80, kHeight = 260;
  double y = top + kMargin + kLine;
  svg.text(kMargin, y, chart.title);
  y += kLine + kGap;
  const Axis across = axis_of(chart, false), up = axis_of(chart, true);
  const auto place = [&](const std::pair<double, double>& point) {
    return std::pair{kAxisLeft + kBarsWidth * across.share(point.first), y + kHeight * (1 - up.share(point.second))};
  };
  for (int i = 0; i <= 4; ++i) {
    const double line = y + kHeight * (1 - 0.25 * i);
    svg.rectangle(kAxisLeft, line, kBarsWidth, 1, "#dddddd");
    svg.text(kAxisLeft - 6, line + 4, fmt::format("{:.4g}", up.at(0.25 * i)), Svg::Anchor::end);
    svg.text(kAxisLeft + 0.25 * i * kBarsWidth, y + kHeight + kLine, fmt::format("{:.4g}", across.at(0.25 * i)));
  }
  for (size_t s = 0; s < chart.series.size(); ++s) {
    const PointChart::Series& series = chart.series[s];
    std::vector<std::pair<double, double>> places;
    for (const auto& point : series.points) places.push_back(place(point));
    if (series.joined)
      svg.polyline(places, colour(s));
    else
      for (const auto& [px, py] : places) svg.dot(px, py, colour(s));
    const double at = y + 10 + kLine * double(s);
    svg.rectangle(kAxisLeft + kBarsWidth + 12, at - 9, 10, 10, colour(s));
    svg.text(kAxisLeft + kBarsWidth + 26, at, series.name);
  }
  svg.text(kAxisLeft, y + kHeight + 2 * kLine, fmt::format("{}; vertical: {}", chart.x_axis, chart.y_axis));
  return std::max(y + kHeight + 2 * kLine, y + kLine * double(chart.series.size()));
}

}  // namespace

void Svg::text(double x, double y, std::string_view text, Anchor anchor) {
  body_ += fmt::format("<text x=\"{:.6g}\" y=\"{:.6g}\"{}>{}</text>\n", x, y,
                       anchor == Anchor::end ? " text-anchor=\"end\"" : "", escaped(text));
}

void Svg::rectangle(double x, double y, double width, double height, std::string_view fill) {
  body_ += fmt::format("<rect x=\"{:.6g}\" y=\"{:.6g}\" width=\"{:.6g}\" height=\"{:.6g}\" fill=\"{}\"/>\n", x, y,
                       width, height, fill);
}

void Svg::path(std::string_view d, std::string_view fill) {
  body_ += fmt::format("<path fill=\"{}\" d=\"{}\"/>\n", fill, d);
}

void Svg::polyline(const std::vector<std::pair<double, double>>& points, std::string_view stroke) {
  std::string places;
  for (const auto& [x, y] : points) places += fmt::format("{}{:.6g},{:.6g}", places.empty() ? "" : " ", x, y);
  body_ += fmt::format("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{}\"/>\n", stroke, places);
}

void Svg::dot(double x, double y, std::string_view fill) {
  body_ += fmt::format("<circle cx=\"{:.6g}\" cy=\"{:.6g}\" r=\"3.5\" fill=\"{}\"/>\n", x, y, fill);
}

std::string Svg::finish(double width, double height) const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.6g}\" height=\"{1:.6g}\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{2}</svg>\n",
      width, height, body_);
}

std::string_view colour(size_t n) {
  static constexpr std::array<std::string_view, 9> kColours = {"#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677",
                                                               "#aa3377", "#bbbbbb", "#222255", "#ee8866"};
  return kColours[n % kColours.size()];
}

std::string draw(const std::vector<BarChart>& charts) {
  Svg svg;
  double y = 0;
  for (const BarChart& chart : charts) y = draw_chart(chart, y, svg);
  return svg.finish(kLeft + kBarsWidth + kRight, y + kMargin);
}

std::string draw(const std::vector<PointChart>& charts) {
  Svg svg;
  double y = 0;
  size_t longest = 0;
  for (const PointChart& chart : charts) {
    y = draw_chart(chart, y, svg);
    for (const PointChart::Series& series : chart.series) longest = std::max(longest, series.name.size());
  }
  return svg.finish(80 + kBarsWidth + 40 + 7 * double(longest), y + kMargin);
}

}  // namespace lacuna::cli
