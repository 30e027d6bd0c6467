#include "calibrate/column_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace lacuna::calibrate {

namespace {

int bin_of(float value, float least, float most) {
  const double width = double(most) - double(least);
  if (!(width > 0)) return 0;
  return std::clamp(int((double(value) - double(least)) / width * kEntropyBins), 0, kEntropyBins - 1);
}

constexpr int64_t kColumnsPerTask = 256;

/// work(begin, end) on ranges of columns.
template <class Work>
void over_columns(int64_t K, ThreadPool* pool, const Work& work) {
  if (pool == nullptr) return work(int64_t{0}, K);
  pool->parallel_for(K, kColumnsPerTask, work);
}

}  // namespace

double entropy_of(std::span<const int64_t> counts) {
  double total = 0, sum = 0;
  for (const int64_t count : counts) total += double(count);
  for (const int64_t count : counts)
    if (count > 0) sum -= double(count) / total * std::log(double(count) / total);
  return sum;
}

ColumnStatistics::ColumnStatistics(int64_t K)
    : K_(K),
      sum_(size_t(K)),
      least_(size_t(K), std::numeric_limits<float>::infinity()),
      most_(size_t(K), -std::numeric_limits<float>::infinity()) {}

void ColumnStatistics::add(const float* x, int64_t stride, int64_t M, ThreadPool* pool) {
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K_; ++k)
      if (!std::isfinite(x[m * stride + k]))
        throw Error("token {}: input {} is {}; the statistics need finite activations", tokens_ + m, k,
                    x[m * stride + k]);
  over_columns(K_, pool, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t k = begin; k < end; ++k) {
        const float value = x[m * stride + k];
        const auto at = size_t(k);
        sum_[at] += double(value) * double(value);
        least_[at] = std::min(least_[at], value);
        most_[at] = std::max(most_[at], value);
      }
    }
  });
  tokens_ += M;
}

void ColumnStatistics::count(const float* x, int64_t stride, int64_t M, ThreadPool* pool) {
  counts_.resize(size_t(K_ * kEntropyBins));
  over_columns(K_, pool, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = begin; k < end; ++k)
        ++counts_[size_t(k * kEntropyBins + bin_of(x[m * stride + k], least_[size_t(k)], most_[size_t(k)]))];
  });
  counted_ += M;
}

std::vector<float> ColumnStatistics::norms() const {
  std::vector<float> out;
  for (const double sum : sum_) out.push_back(float(std::sqrt(sum)));
  return out;
}

std::vector<float> ColumnStatistics::entropies() const {
  if (counted_ != tokens_)
    throw Error("{} tokens were counted, but the ranges are of {}; show the second pass the tokens of the first",
                counted_, tokens_);
  std::vector<float> out(size_t(K_), 0.0f);
  for (int64_t k = 0; k < K_ && counted_ > 0; ++k)
    out[size_t(k)] = float(entropy_of(std::span(counts_).subspan(size_t(k * kEntropyBins), size_t{kEntropyBins})));
  return out;
}

}  // namespace lacuna::calibrate
