// src/solver/columns_raw.h - what columns.h asks of a GPU, without LibTorch, whose headers nvcc does not read.
#pragma once

#include <cstdint>

namespace lacuna::solver {

/// Most columns of a block on a GPU, whose fixed columns lie in a multiprocessor's shared memory.
inline constexpr int64_t kMostBlockColumns = 384;

namespace detail {

/// A ColumnBlock and its rule as plain memory: row k of each [B, N] at k * N, of the factor at k * factor_step.
struct RawColumns {
  int64_t N = 0, first = 0, last = 0, end = 0, factor_step = 0;
  float* values = nullptr;
  const float* factor = nullptr;
  float* stored = nullptr;
  float* left = nullptr;
  float* code = nullptr;           // nullptr: not rounded
  const float* inverse = nullptr;  // nullptr: a sweep
  const float *scale = nullptr, *zero = nullptr, *step = nullptr;
  const bool* keep = nullptr;  // nullptr: nothing is dropped
  float most = 0;              // largest code
  int device = 0;              // of the memory, where it is a GPU's
};

/// On that device's default stream, as LibTorch's operations. Throws Error when it cannot be launched.
void fix_columns_cuda(const RawColumns& columns);

}  // namespace detail

}  // namespace lacuna::solver
