// src/model/flux/linear.h - the net's linear layers: the one place where it meets stored layouts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/linear.h"

namespace lacuna::model::flux {

/// The input of a linear layer, and the tensors that read it, each once, as the checkpoint names them.
struct LinearInput {
  std::span<const std::string> weights;
  const float* x = nullptr;  // [M, K], rows `stride` floats apart
  int64_t M = 0, K = 0, stride = 0;
};
/// Sees inputs before the layer runs.
using InputObserver = std::function<void(const LinearInput& input)>;

/// Weights that read one input (q, k, v; a whole single block's first products), each with an output of its own.
class Linear {
 public:
  Linear() = default;
  Linear(std::span<const kernels::WeightView> parts, ThreadPool& pool);
  /// x: [M, K], rows `stride` floats apart; y: one a part.
  void run(const float* x, int64_t M, int64_t stride, std::span<const kernels::Output> y,
           const InputObserver* observer = nullptr);
  /// Of a single part, rows of x and y one after the other.
  void run(const float* x, int64_t M, float* y, const InputObserver* observer = nullptr);
  int64_t K() const { return K_; }
  /// Rows of all parts.
  int64_t N() const { return N_; }

 private:
  std::unique_ptr<kernels::LinearGroup> group_;
  std::vector<std::string> names_;
  int64_t N_ = 0, K_ = 0;
};

/// One weight an expert, all of one shape: rows that are sorted by expert go through the weight of theirs.
class GroupedLinear {
 public:
  GroupedLinear() = default;
  GroupedLinear(std::span<const kernels::WeightView> experts, ThreadPool& pool);
  /// x: [M, K]; y: [M, N]; rows [offsets[e], offsets[e + 1]) are expert e's. offsets: [experts + 1], from 0 to M,
  /// ascending; an expert may have no row.
  void run(const float* x, std::span<const int64_t> offsets, float* y, const InputObserver* observer = nullptr);

 private:
  std::vector<Linear> experts_;
};

}  // namespace lacuna::model::flux
