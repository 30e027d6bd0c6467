// src/kernels/cpu/skip_rows.h - skipping inputs in a row layout: what SpQt's zigzag layouts are compared with
// (section 6.1, "Naive sparse"). No table of kernels has it: it is slower than multiplying everything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/dispatch.h"

namespace lacuna::cpu {

/// Rows [row0, row1) of y = W x, of x only the active inputs, listed by blocks of 32 inputs.
struct SkipRowsArgs {
  const std::byte* weight = nullptr;  // q4_K, [N, K]
  int64_t K = 0;
  const int32_t* start = nullptr;  // [K/32 + 1] where each block's inputs begin in the lists
  const uint8_t* place = nullptr;  // [active] of each input in its block
  const float* x = nullptr;        // [active]
  const float* sum = nullptr;      // [K/32] sum of a block's active inputs
  float* y = nullptr;
  int64_t row0 = 0, row1 = 0;
};

LACUNA_CPU_DECLARE(void skip_rows_q4_K(const SkipRowsArgs& a))

}  // namespace lacuna::cpu
