#include "calibrate/histogram.h"

#include <algorithm>

namespace lacuna::calibrate {

void Histogram::add(std::span<const uint32_t> counts) {
  for (size_t bin = 0; bin < bins_.size(); ++bin) {
    bins_[bin] += counts[bin];
    count_ += counts[bin];
  }
}

float Histogram::quantile(double share) const {
  if (share <= 0 || count_ == 0) return 0;
  const double wanted = share * double(count_);
  double below = 0;
  for (size_t bin = 0; bin + 1 < bins_.size(); ++bin) {
    const double next = below + bins_[bin];
    if (next >= wanted && bins_[bin] > 0) {
      if (bin == 0) return edge(1);
      return float(edge(bin) + (wanted - below) / bins_[bin] * (double(edge(bin + 1)) - edge(bin)));
    }
    below = next;
  }
  return edge(bins_.size() - 1);
}

double Histogram::share_below(float t) const {
  if (count_ == 0 || !(t > 0)) return 0;
  const size_t last = std::bit_cast<uint32_t>(t) >> kShift;
  double below = 0;
  for (size_t bin = 0; bin < last; ++bin) below += bins_[bin];
  const double width = double(edge(last + 1)) - edge(last);
  below += bins_[last] * (double(t) - edge(last)) / width;
  return below / double(count_);
}

double Histogram::energy_below(float t) const {
  double below = 0, all = 0;
  for (size_t bin = 0; bin < bins_.size(); ++bin) {
    if (bins_[bin] == 0) continue;
    const double low = edge(bin), high = edge(bin + 1), middle = 0.5 * (low + high);
    const double energy = bins_[bin] * middle * middle;
    all += energy;
    below += energy * std::clamp((double(t) - low) / (high - low), 0.0, 1.0);
  }
  return all > 0 ? below / all : 0;
}

std::vector<int64_t> Histogram::counts(const std::vector<float>& edges) const {
  std::vector<int64_t> out(edges.empty() ? 0 : edges.size(), 0);
  for (size_t bin = 0; bin < bins_.size(); ++bin) {
    if (bins_[bin] == 0) continue;
    const auto after = std::upper_bound(edges.begin(), edges.end(), edge(bin));
    if (after != edges.begin()) out[size_t(after - edges.begin()) - 1] += bins_[bin];
  }
  return out;
}

}  // namespace lacuna::calibrate
