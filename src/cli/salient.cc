#include "cli/salient.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cli/svg.h"

namespace lacuna::cli {
namespace {

constexpr double kEdge = 14, kTextLine = 16, kTop = 54;
constexpr int64_t kCellRows = 64, kCellColumns = 128, kShownRows = 256, kShownColumns = 384;
constexpr double kCell = 3, kWeight = 2;  // pixels
/// From few to many.
constexpr std::array<std::string_view, 4> kShades = {"#d6e0ec", "#99b3cf", "#5a80ab", "#22466f"};

/// Rectangles of equal fill as one path: runs of cells along a row.
class Cells {
 public:
  Cells(double left, double top, double size) : left_(left), top_(top), size_(size) {}
  void run(int64_t row, int64_t first, int64_t count) {
    path_ += fmt::format("M{:.6g} {:.6g}h{:.6g}v{:.6g}h{:.6g}z", left_ + size_ * double(first),
                         top_ + size_ * double(row), size_ * double(count), size_, -size_ * double(count));
  }
  const std::string& path() const { return path_; }

 private:
  double left_, top_, size_;
  std::string path_;
};

/// Draws the cells for which shade_of(row, column) is `shade`.
template <typename ShadeOf>
void draw_shade(Svg& svg, Cells cells, int64_t rows, int64_t columns, int shade, std::string_view fill,
                const ShadeOf& shade_of) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns;) {
      int64_t end = c;
      while (end < columns && shade_of(r, end) == shade) ++end;
      if (end > c) cells.run(r, c, end - c);
      c = std::max(end, c + 1);
    }
  if (!cells.path().empty()) svg.path(cells.path(), fill);
}

}  // namespace

Clustering clustering_of(const SalientMap& map) {
  Clustering out;
  int64_t salient = 0, in_rows = 0, in_columns = 0;
  const auto is = [&](int64_t n, int64_t k) { return map.top[size_t(n * map.K + k)] != 0; };
  const int64_t along = (map.K + map.group - 1) / map.group, down = (map.N + map.group - 1) / map.group;
  std::vector<uint8_t> columns_hold(size_t(down * map.K), 0);
  for (int64_t n = 0; n < map.N; ++n)
    for (int64_t g = 0; g < along; ++g) {
      int64_t here = 0;
      for (int64_t k = g * map.group; k < std::min(map.K, (g + 1) * map.group); ++k) {
        if (!is(n, k)) continue;
        ++here;
        columns_hold[size_t(n / map.group * map.K + k)] = 1;
      }
      salient += here;
      in_rows += here > 0;
    }
  in_columns = std::count(columns_hold.begin(), columns_hold.end(), uint8_t{1});
  out.share = double(salient) / double(std::max<int64_t>(1, map.N * map.K));
  out.row_groups = double(in_rows) / double(std::max<int64_t>(1, map.N * along));
  out.column_groups = double(in_columns) / double(std::max<int64_t>(1, down * map.K));
  out.by_chance = 1 - std::pow(1 - out.share, double(map.group));
  return out;
}

std::string draw(const SalientMap& map) {
  Svg svg;
  const Clustering clustering = clustering_of(map);
  svg.text(kEdge, kEdge + kTextLine,
           fmt::format("{} [{}, {}]: the {:.3g}% of its weights with the largest w^2 / [H^-1]_ii^2 (GQSA, equation 4)",
                       map.tensor, map.N, map.K, 100 * clustering.share));

  // The whole matrix, coarsely.
  const int64_t rows = std::min(map.N, kCellRows), columns = std::min(map.K, kCellColumns);
  std::vector<int64_t> count(size_t(rows * columns), 0), size(count.size(), 0);
  for (int64_t n = 0; n < map.N; ++n)
    for (int64_t k = 0; k < map.K; ++k) {
      const auto cell = size_t(n * rows / map.N * columns + k * columns / map.K);
      count[cell] += map.top[size_t(n * map.K + k)];
      ++size[cell];
    }
  // Shades begin at one, two, four and eight times the share that every cell would have by chance.
  const auto shade_of = [&](int64_t r, int64_t c) {
    const auto cell = size_t(r * columns + c);
    if (count[cell] == 0) return -1;
    const double times = double(count[cell]) / double(size[cell]) / clustering.share;
    return times < 1 ? -1 : std::min(int(std::log2(times)), int(kShades.size()) - 1);
  };
  double x = kEdge;
  svg.text(x, kTop - 6, fmt::format("all of it, {} x {} cells; shades: 1, 2, 4, 8 times the mean", rows, columns));
  svg.rectangle(x, kTop, kCell * double(columns), kCell * double(rows), "#f7f7f7");
  for (size_t shade = 0; shade < kShades.size(); ++shade)
    draw_shade(svg, {x, kTop, kCell}, rows, columns, int(shade), kShades[shade], shade_of);

  // A corner, weight by weight.
  x += kCell * double(std::max<int64_t>(columns, 110)) + 2 * kEdge;
  const int64_t shown_rows = std::min(map.N, kShownRows), shown_columns = std::min(map.K, kShownColumns);
  svg.text(x, kTop - 6,
           fmt::format("its first {} rows and {} columns, a square each weight", shown_rows, shown_columns));
  svg.rectangle(x, kTop, kWeight * double(shown_columns), kWeight * double(shown_rows), "#f7f7f7");
  draw_shade(svg, {x, kTop, kWeight}, shown_rows, shown_columns, 1, kShades.back(),
             [&](int64_t r, int64_t c) { return int(map.top[size_t(r * map.K + c)] != 0); });

  double y = kTop + std::max(kCell * double(rows), kWeight * double(shown_rows)) + 1.5 * kTextLine;
  svg.text(
      kEdge, y,
      fmt::format("{:.2f}% of the groups of {} along rows hold one of them, {:.2f}% of those along columns; strewn "
                  "evenly it would be {:.2f}%",
                  100 * clustering.row_groups, map.group, 100 * clustering.column_groups, 100 * clustering.by_chance));
  return svg.finish(std::max(x + kWeight * double(shown_columns) + kEdge, 720.0), y + kEdge);
}

}  // namespace lacuna::cli
