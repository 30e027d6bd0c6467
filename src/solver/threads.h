// src/solver/threads.h - parts of independent work on as many threads as LibTorch uses.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace lacuna::solver {

/// Calls part(begin, end) on parts of [0, count) at once; `work`: elements that all of it touches, too few of which are
/// not worth a thread. `part` must not throw, and results must not depend on how [0, count) is cut.
inline void for_parts(int64_t count, int64_t work, const std::function<void(int64_t, int64_t)>& part) {
  const int64_t threads = work < 65536 ? 1 : std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(count, 1));
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(part, count * t / threads, count * (t + 1) / threads);
  part(0, count / threads);
  for (std::thread& other : others) other.join();
}

}  // namespace lacuna::solver
