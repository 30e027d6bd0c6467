#include "kernels/active.h"

#include <algorithm>

#include "kernels/cpu/active_isa.h"

namespace lacuna::kernels {
namespace {

/// Inputs of one range; fewer than two ranges are collected by the caller alone, which takes microseconds.
constexpr int64_t kRange = 8192;
constexpr int64_t kMostRanges = 64;

}  // namespace

int64_t collect_active(ThreadPool& pool, const float* x, int64_t M, int64_t K, const float* norms, float t,
                       int32_t* active) {
  const auto write = LACUNA_CPU_SELECT(write_active);
  const cpu::ActiveArgs all{x, M, K, norms, t, 0, K};
  const int64_t ranges = std::min({K / kRange, kMostRanges, int64_t{pool.size()}});
  if (ranges < 2) return write(all, active);
  const auto range = [&](int64_t i) {
    cpu::ActiveArgs a = all;
    a.begin = K * i / ranges;
    a.end = K * (i + 1) / ranges;
    return a;
  };
  const auto count = LACUNA_CPU_SELECT(count_active);
  int64_t first[kMostRanges + 1] = {};  // of each range in the list
  pool.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) first[i + 1] = count(range(i));
  });
  for (int64_t i = 0; i < ranges; ++i) first[i + 1] += first[i];
  pool.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) write(range(i), active + first[i]);
  });
  return first[ranges];
}

int64_t collect_active_groups(const float* x, int64_t M, int64_t K, const float* norms, float t, int64_t group,
                              int32_t* active) {
  int64_t count = 0;
  for (int64_t k = 0; k < K; k += group) {
    const int64_t n = std::min(group, K - k);
    bool keep = false;
    for (int64_t m = 0; m < M && !keep; ++m)
      keep = !(group_size(x + m * K + k, norms == nullptr ? nullptr : norms + k, n) < t);
    for (int64_t i = 0; keep && i < n; ++i) active[count++] = int32_t(k + i);
  }
  return count;
}

}  // namespace lacuna::kernels
