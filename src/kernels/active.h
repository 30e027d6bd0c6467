// src/kernels/active.h - which inputs of a token count: the list that sparse kernels walk (SpQt, section 4.2, index
// collection).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/thread_pool.h"

namespace lacuna::kernels {

/// x: [M, K]. Input k is inactive if and only if |x[m, k]| < t for every token m, or |x[m, k]| * norms[k] < t where
/// norms are given ([K] or nullptr): equality, NaN and infinity are active. Writes the indices of the active ones,
/// ascending, to active ([K]) and returns how many there are. Many inputs are shared out: each worker counts those of
/// its range, the sums of the counts say where it writes.
int64_t collect_active(ThreadPool& pool, const float* x, int64_t M, int64_t K, const float* norms, float t,
                       int32_t* active);

/// Inputs whose size is the root of a mean square: one thresholds whole groups of `group` neighbours (the last may be
/// shorter), because some kernels can only leave groups out.
/// x, norms: of the group's n inputs (norms may be nullptr). NaN and infinity give themselves.
inline float group_size(const float* x, const float* norms, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float size = norms != nullptr ? x[i] * norms[i] : x[i];
    sum += size * size;
  }
  return std::sqrt(sum / float(n));
}

/// collect_active by groups: writes all inputs of a group unless group_size of every token is below t.
int64_t collect_active_groups(const float* x, int64_t M, int64_t K, const float* norms, float t, int64_t group,
                              int32_t* active);

}  // namespace lacuna::kernels
