#include "eval/bandwidth.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/huge_buffer.h"

namespace lacuna::eval {
namespace {

constexpr int64_t kLeastBytes = int64_t{1} << 30;
constexpr int kPasses = 5;
constexpr int64_t kBlockBytes = int64_t{1} << 20;  // taken by one worker at a time

/// Sum of [count] words, count a multiple of 32; many independent sums, so that only memory limits it.
uint64_t sum(const uint64_t* words, int64_t count) {
  uint64_t sums[32] = {};
  for (int64_t i = 0; i < count; i += 32)
    for (int j = 0; j < 32; ++j) sums[j] += words[i + j];
  uint64_t total = 0;
  for (const uint64_t s : sums) total += s;
  return total;
}

}  // namespace

int64_t last_level_cache_bytes() {
  for (const int name : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE})
    if (const long size = ::sysconf(name); size > 0) return size;
  return 0;
}

double measure_read_gb_s(ThreadPool& pool) {
  const int64_t blocks = (std::max(kLeastBytes, 4 * last_level_cache_bytes()) + kBlockBytes - 1) / kBlockBytes;
  HugeBuffer buffer(size_t(blocks * kBlockBytes));
  auto* words = reinterpret_cast<uint64_t*>(buffer.data());
  constexpr int64_t kWords = kBlockBytes / int64_t(sizeof(uint64_t));
  pool.parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kWords; i < end * kWords; ++i) words[i] = uint64_t(i);
  });
  std::atomic<uint64_t> total{0};  // keeps the reads
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    // A contiguous share each, as a kernel's rows are read.
    pool.run([&](int worker) {
      const int64_t begin = blocks * worker / pool.size(), end = blocks * (worker + 1) / pool.size();
      total += sum(words + begin * kWords, (end - begin) * kWords);
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, double(blocks * kBlockBytes) / seconds / 1e9);
  }
  return best;
}

}  // namespace lacuna::eval
