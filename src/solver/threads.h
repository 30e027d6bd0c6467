// src/solver/threads.h - parts of independent work on as many threads as LibTorch uses.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace lacuna::solver {

/// Parts that [0, count) is cut into. work: elements that all of it touches, too few of which are not worth a thread.
inline int64_t part_count(int64_t count, int64_t work) {
  return work < 65536 ? 1 : std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(count, 1));
}

/// Calls body(part, begin, end) on the parts at once. It must not throw, and results must not depend on how [0, count)
/// is cut. Where the system starts no more threads, the caller does the rest.
inline void for_parts(int64_t count, int64_t work, const std::function<void(int64_t, int64_t, int64_t)>& body) {
  const int64_t parts = part_count(count, work);
  const auto run = [&](int64_t part) { body(part, count * part / parts, count * (part + 1) / parts); };
  std::vector<std::thread> others;
  others.reserve(size_t(parts));
  int64_t part = 1;
  try {
    for (; part < parts; ++part) others.emplace_back(run, part);
  } catch (const std::system_error&) {
    for (; part < parts; ++part) run(part);
  }
  run(0);
  for (std::thread& other : others) other.join();
}

}  // namespace lacuna::solver
