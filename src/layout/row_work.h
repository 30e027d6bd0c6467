// src/layout/row_work.h - what the encoders of grouped rows share: a loop over rows whose errors name the row, and what
// f16 holds.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "core/scalar.h"
#include "core/thread_pool.h"

namespace lacuna::layout {

inline constexpr float kLargestHalf = 65504;

/// Whether f16 holds exactly this finite value.
inline bool holds_exactly(float value) { return std::abs(value) <= kLargestHalf && to_float(to_f16(value)) == value; }
/// Whether the nearest f16 is finite.
inline bool fits_half(float value) { return (to_f16(value).bits & 0x7c00u) != 0x7c00u; }

/// Runs work(n) for every row, on the pool's workers where there is one; the first Error ends it, named by its row.
template <class Work>
void each_row(int64_t N, ThreadPool* pool, const Work& work) {
  constexpr int64_t kGrain = 16;  // rows that a worker takes at once
  const auto rows = [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      try {
        work(n);
      } catch (const Error& error) {
        throw Error("row {}: {}", n, error.what());
      }
    }
  };
  if (pool == nullptr)
    rows(0, N);
  else
    pool->parallel_for(N, kGrain, rows);
}

}  // namespace lacuna::layout
