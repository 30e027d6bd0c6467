// src/eval/bandwidth.h - this machine's memory read rate, the ceiling of every memory-bound kernel.
#pragma once

#include <cstdint>

#include "core/thread_pool.h"

namespace lacuna::eval {

/// The best of several sequential reads of at least 1 GiB and four times the last-level cache, by all workers of the
/// pool. GB/s (10^9 bytes).
double measure_read_gb_s(ThreadPool& pool);

/// The same for columns of `column_bytes` of which a share, random ones, is read, as a sparse product reads them: each
/// worker takes a contiguous part of the list of columns, in ascending order, and asks for memory some lines ahead,
/// across the gaps. GB/s of what is read, the best of several distances. Only whole 8 bytes of a column are read.
/// Throws Error unless 64 <= column_bytes and 0 < share <= 1.
double measure_column_read_gb_s(ThreadPool& pool, int64_t column_bytes, double share);

/// Cycles a second of the calling thread's core under load: those of a chain of dependent additions.
double measure_clock_ghz();

}  // namespace lacuna::eval
