// src/eval/spqt_baselines.h - the baselines that SpQt compares its sparse kernel with (section 6.1): correct products
// that leave inactive inputs out, without what makes leaving them out worth while.
#pragma once

#include <cstdint>
#include <vector>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "kernels/cpu/zigzag_kernel.h"
#include "kernels/linear.h"

namespace lacuna::eval {

/// B1, "naive sparse": q4_K row by row, each row walks the active inputs; threads share out the rows.
class SkippingRows {
 public:
  /// weight: q4_K, whose bytes are read in place. Throws Error for another layout.
  SkippingRows(const kernels::WeightView& weight, ThreadPool& pool);
  /// Inputs with |x| < threshold are left out. x: [K], y: [N].
  void run(const float* x, float threshold, float* y);

 private:
  kernels::WeightView weight_;
  ThreadPool& pool_;
  std::vector<int32_t> start_;
  std::vector<uint8_t> place_;
  std::vector<float> active_, sum_;
};

/// B2, "ours sparse (no load balancing)": zigzag columns skipped on the fly. Each worker has a fixed, equal range of
/// columns, tests its inputs one after the other and hands the active ones to the zigzag kernel as soon as it has found
/// a few: there is no list of active columns, so nothing tells what to prefetch and nobody evens out the work.
class UnbalancedZigzag {
 public:
  /// weight: zz4_k, whole columns (tile_rows 0), whose bytes are read in place. Throws Error for anything else.
  UnbalancedZigzag(const kernels::WeightView& weight, ThreadPool& pool);
  void run(const float* x, float threshold, float* y);

 private:
  /// Columns that are handed over at once: the kernel takes them four by four and rounds their factors together.
  static constexpr int64_t kFound = 16;
  void run_worker(const float* x, float threshold, int worker);

  kernels::WeightView weight_;
  ThreadPool& pool_;
  const cpu::ZigzagKernel& kernel_;
  int64_t rows_;     // of superblocks
  HugeBuffer sums_;  // [workers][rows, 256 + kZigzagMins]
};

}  // namespace lacuna::eval
