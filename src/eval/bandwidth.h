// src/eval/bandwidth.h - this machine's memory read rate, the ceiling of every memory-bound kernel.
#pragma once

#include <cstdint>

#include "core/thread_pool.h"

namespace lacuna::eval {

/// Size of the last-level cache as the system reports it; 0 when it does not.
int64_t last_level_cache_bytes();

/// The best of several sequential reads of at least 1 GiB and four times the last-level cache, by all workers of the
/// pool. GB/s (10^9 bytes).
double measure_read_gb_s(ThreadPool& pool);

}  // namespace lacuna::eval
