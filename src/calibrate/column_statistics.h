// src/calibrate/column_statistics.h - what 2:4 masks want to know of a matrix's inputs (io/image_masks.h): the L2 norm
// of each over all tokens, and the information entropy of its values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"

namespace lacuna::calibrate {

/// Bins between a column's least and largest value, as E-Sparse has them (arXiv:2310.15929).
inline constexpr int kEntropyBins = 100;

/// Entropy in nats of values counted in bins: -sum p ln p. 0 where nothing was counted.
double entropy_of(std::span<const int64_t> counts);

/// Norms and ranges take one pass over the tokens, entropies a second over the same ones.
class ColumnStatistics {
 public:
  explicit ColumnStatistics(int64_t K);
  int64_t K() const { return K_; }
  int64_t tokens() const { return tokens_; }

  /// x: [M, K], rows `stride` floats apart. Throws Error naming token (of all added so far) and input of the first
  /// value that is not finite; then nothing of x is added. pool: shares the columns out; the results are the same.
  void add(const float* x, int64_t stride, int64_t M, ThreadPool* pool = nullptr);
  /// The second pass: values are counted in the bins that the first found. What lies outside counts in the outer bins.
  void count(const float* x, int64_t stride, int64_t M, ThreadPool* pool = nullptr);

  /// [K]
  std::vector<float> norms() const;
  /// [K]; Throws Error unless as many tokens were counted as were added. A column of one value has no entropy.
  std::vector<float> entropies() const;

 private:
  int64_t K_, tokens_ = 0, counted_ = 0;
  std::vector<double> sum_;          // of squares
  std::vector<float> least_, most_;  // [K]
  std::vector<int64_t> counts_;      // [K, kEntropyBins]
};

}  // namespace lacuna::calibrate
