// src/model/flux/linear.h - the net's linear layers: the one place where it meets stored layouts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/linear.h"

namespace lacuna::model::flux {

/// Weights that read one input (q, k, v; a whole single block's first products), each with an output of its own.
class Linear {
 public:
  Linear() = default;
  Linear(std::span<const kernels::WeightView> parts, ThreadPool& pool);
  /// x: [M, K], rows `stride` floats apart; y: one a part.
  void run(const float* x, int64_t M, int64_t stride, std::span<const kernels::Output> y);
  /// Of a single part, rows of x and y one after the other.
  void run(const float* x, int64_t M, float* y);
  int64_t K() const { return K_; }
  /// Rows of all parts.
  int64_t N() const { return N_; }

 private:
  std::unique_ptr<kernels::LinearGroup> group_;
  int64_t N_ = 0, K_ = 0;
};

/// One weight an expert, all of one shape: rows that are sorted by expert go through the weight of theirs.
class GroupedLinear {
 public:
  GroupedLinear() = default;
  GroupedLinear(std::span<const kernels::WeightView> experts, ThreadPool& pool);
  /// x: [M, K]; y: [M, N]; rows [offsets[e], offsets[e + 1]) are expert e's. offsets: [experts + 1], from 0 to M,
  /// ascending; an expert may have no row.
  void run(const float* x, std::span<const int64_t> offsets, float* y);

 private:
  std::vector<Linear> experts_;
};

}  // namespace lacuna::model::flux
