// src/cli/svg.h - drawings of results as SVG text.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lacuna::cli {

/// A picture that grows; coordinates are pixels from the upper left corner.
class Svg {
 public:
  enum class Anchor : unsigned char { start, end };

  void text(double x, double y, std::string_view text, Anchor anchor = Anchor::start);
  void rectangle(double x, double y, double width, double height, std::string_view fill);
  /// d: the commands of an SVG path.
  void path(std::string_view d, std::string_view fill);
  /// Straight lines through the points.
  void polyline(const std::vector<std::pair<double, double>>& points, std::string_view stroke);
  void dot(double x, double y, std::string_view fill);
  /// The file, on white.
  std::string finish(double width, double height) const;

 private:
  std::string body_;
};

/// The n-th of a few colours that can be told apart, also without seeing red and green; they repeat.
std::string_view colour(size_t n);

/// Horizontal bars in groups, the value beside each; a series has one colour.
struct BarChart {
  struct Group {
    std::string name;
    std::vector<std::optional<double>> values;  // of each series; nullopt: no bar
  };
  std::string title, unit;
  std::vector<std::string> series;
  std::vector<Group> groups;
  std::optional<double> mark;  // a line at this value
};

/// The charts one below the other.
std::string draw(const std::vector<BarChart>& charts);

/// Points over two axes; a series has one colour. The vertical axis is logarithmic where all values are positive and
/// the largest is eight times the smallest or more.
struct PointChart {
  struct Series {
    std::string name;
    std::vector<std::pair<double, double>> points;
    bool joined = false;  // with lines instead of dots
  };
  std::string title, x_axis, y_axis;
  std::vector<Series> series;
};

std::string draw(const std::vector<PointChart>& charts);

}  // namespace lacuna::cli
