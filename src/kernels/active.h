// src/kernels/active.h - which inputs of a token count: the list that sparse kernels walk (SpQt, section 4.2, index
// collection).
#pragma once

#include <cstdint>

#include "core/thread_pool.h"

namespace lacuna::kernels {

/// x: [M, K]. Input k is inactive if and only if |x[m, k]| < t for every token m, or |x[m, k]| * norms[k] < t where
/// norms are given ([K] or nullptr): equality, NaN and infinity are active. Writes the indices of the active ones,
/// ascending, to active ([K]) and returns how many there are. Many inputs are shared out: each worker counts those of
/// its range, the sums of the counts say where it writes.
int64_t collect_active(ThreadPool& pool, const float* x, int64_t M, int64_t K, const float* norms, float t,
                       int32_t* active);

}  // namespace lacuna::kernels
