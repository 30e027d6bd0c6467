// src/calibrate/second_moment.h - the second moment of a linear layer's inputs, C = X^T X / tokens, X: [tokens, K],
// which AWP's mask reads (calibrate/two_of_four_descent.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"

namespace lacuna::calibrate {

/// Sums are of float32 products over at most 256 tokens, added up in double precision. Holds K (K + 1) / 2 doubles.
class SecondMoment {
 public:
  explicit SecondMoment(int64_t K);
  /// Of sums made elsewhere: X^T X's upper triangle, row by row, over `tokens` tokens.
  SecondMoment(int64_t K, int64_t tokens, std::vector<double> sums);
  static int64_t bytes(int64_t K) { return K * (K + 1) / 2 * int64_t(sizeof(double)); }

  int64_t K() const { return K_; }
  int64_t tokens() const { return tokens_; }
  /// x: [M, K], rows `stride` floats apart.
  void add(const float* x, int64_t stride, int64_t M, ThreadPool& pool);
  /// Row i of C: [K]. Throws Error for a value past float32.
  void row(int64_t i, std::span<float> out) const;

 private:
  size_t at(int64_t i, int64_t j) const { return size_t(i * K_ - i * (i - 1) / 2 + j - i); }  // i <= j
  int64_t K_, tokens_ = 0;
  std::vector<double> sum_;  // of the upper triangle, row by row
};

}  // namespace lacuna::calibrate
