#include "eval/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/machine.h"
#include "core/rng.h"

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

/// Columns to read and how many lines ahead to ask for.
struct ColumnRead {
  const std::byte* base;
  int64_t column_bytes;
  const int32_t* columns;
  int64_t count;
  int64_t ahead;  // lines of 64 bytes; 0: the hardware alone
};

uint64_t sum_columns(const ColumnRead& a) {
  const int64_t words = a.column_bytes / int64_t(sizeof(uint64_t)), whole = words / 8, lines = (words + 7) / 8;
  uint64_t sums[8] = {}, total = 0;
  // The line that is `ahead` lines on in the columns of the list.
  int64_t column = a.ahead / lines, line = a.ahead % lines;
  for (int64_t i = 0; i < a.count; ++i) {
    const auto* at = reinterpret_cast<const uint64_t*>(a.base + a.columns[i] * a.column_bytes);
    for (int64_t l = 0; l < lines; ++l) {
      if (a.ahead > 0 && column < a.count)
        __builtin_prefetch(a.base + a.columns[column] * a.column_bytes + 64 * line, 0, 2);
      if (++line == lines) line = 0, ++column;
      if (l < whole)
        for (int j = 0; j < 8; ++j) sums[j] += at[8 * l + j];
    }
    for (int64_t w = 8 * whole; w < words; ++w) total += at[w];
  }
  for (const uint64_t s : sums) total += s;
  return total;
}

}  // namespace

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

double measure_column_read_gb_s(ThreadPool& pool, int64_t column_bytes, double share) {
  if (column_bytes < 64 || !(share > 0 && share <= 1))
    throw Error("columns of {} bytes, {} of them read: expected at least 64 bytes and a share above 0 and up to 1",
                column_bytes, share);
  const int64_t columns = (std::max(kLeastBytes, 4 * last_level_cache_bytes()) + column_bytes - 1) / column_bytes;
  if (columns > INT32_MAX) throw Error("{} columns of {} bytes are more than can be listed", columns, column_bytes);
  HugeBuffer buffer(size_t(columns * column_bytes));
  pool.parallel_for(columns, 64, [&](int64_t begin, int64_t end) {
    std::memset(buffer.data() + begin * column_bytes, 1, size_t((end - begin) * column_bytes));
  });
  std::vector<int32_t> active;
  Rng rng{uint64_t(column_bytes)};
  for (int64_t c = 0; c < columns; ++c)
    if (rng.uniform() < share) active.push_back(int32_t(c));
  if (active.empty()) active.push_back(0);
  std::atomic<uint64_t> total{0};  // keeps the reads
  double best = 0;
  for (const int64_t ahead : {0, 8, 24, 64}) {
    for (int pass = 0; pass < 2; ++pass) {
      const auto start = std::chrono::steady_clock::now();
      pool.run([&](int worker) {
        const auto count = int64_t(active.size());
        const int64_t begin = count * worker / pool.size(), end = count * (worker + 1) / pool.size();
        total += sum_columns({buffer.data(), column_bytes, active.data() + begin, end - begin, ahead});
      });
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      best = std::max(best, double(active.size()) * double(column_bytes) / seconds / 1e9);
    }
  }
  return best;
}

double measure_clock_ghz() {
  constexpr int64_t kAdditions = 20'000'000;
  double best = 0;
  uint64_t sum = 1, step = 3;
  for (int pass = 0; pass < 5; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < kAdditions; i += 8) {
      for (int j = 0; j < 8; ++j) {
        sum += step;  // one cycle; the compiler knows neither of the two
        asm volatile("" : "+r"(sum), "+r"(step));
      }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, double(kAdditions) / seconds / 1e9);
  }
  return best;
}

}  // namespace lacuna::eval
