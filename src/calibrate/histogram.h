// src/calibrate/histogram.h - how large the values of an input are: counts over bins of 2^-9 relative width.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lacuna::calibrate {

/// A bin holds the magnitudes whose float bits agree in exponent and the upper 9 bits of the mantissa, so a quantile is
/// off by less than 1/512 of its value whatever the distribution, and any number of values fits.
class Histogram {
 public:
  /// A bin is the float bits above the lowest kShift ones.
  static constexpr int kShift = 14;
  static constexpr size_t kBins = size_t{1} << (31 - kShift);

  Histogram() : bins_(kBins) {}
  /// magnitude: >= 0 and finite.
  void add(float magnitude) {
    ++bins_[std::bit_cast<uint32_t>(magnitude) >> kShift];
    ++count_;
  }
  /// counts: of each bin, [kBins].
  void add(std::span<const uint32_t> counts);
  int64_t count() const { return count_; }
  /// The t for which `share` of the values are below it. share <= 0: 0. Zeros always count as below: where more than
  /// `share` of the values are zero, t is the smallest bin's upper edge.
  float quantile(double share) const;
  /// Share of the values below t; inside a bin values are taken as spread evenly.
  double share_below(float t) const;
  /// Share of the sum of squares that is below t.
  double energy_below(float t) const;

  /// Counts of [edges[i], edges[i + 1]), for drawing; the last bin takes everything above.
  std::vector<int64_t> counts(const std::vector<float>& edges) const;

 private:
  static float edge(size_t bin) { return std::bit_cast<float>(uint32_t(bin) << kShift); }
  std::vector<uint64_t> bins_;
  int64_t count_ = 0;
};

}  // namespace lacuna::calibrate
