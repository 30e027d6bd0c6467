#include "core/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/cpu_quota.h"
#include "core/error.h"

namespace lacuna {
namespace {

// About 20-50 us: longer than the serial parts between two jobs of one token, short enough not to burn a core that
// another program wants.
constexpr int kSpins = 4000;

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

template <class T>
void wait_while_equal(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_cpu();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

int usable_cores() {
  int cores = std::max(1, int(std::thread::hardware_concurrency()));
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) cores = CPU_COUNT(&set);
  std::string cpu_max;  // of the group that this process sees as the root: in a container, the container's
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::getline(file, cpu_max);
  return std::min(cores, cores_of_quota(cpu_max).value_or(cores));
}

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) threads = usable_cores();
  threads_.reserve(size_t(threads - 1));
  for (int worker = 1; worker < threads; ++worker) {
    try {
      threads_.emplace_back([this, worker] { worker_loop(worker); });
    } catch (const std::exception& error) {
      stop();
      throw Error("cannot start thread {} of {}: {}; use fewer --threads", worker + 1, threads, error.what());
    }
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stop_.store(true, std::memory_order_release);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::call(int worker) noexcept {
  try {
    job_(context_, worker);
  } catch (...) {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::dispatch(JobFn fn, void* context) {
  job_ = fn;
  context_ = context;
  if (!threads_.empty()) {
    running_.store(int(threads_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  call(0);
  if (!threads_.empty()) {
    for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) wait_while_equal(running_, left);
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::worker_loop(int worker) {
  uint32_t seen = 0;
  for (;;) {
    wait_while_equal(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) return;
    call(worker);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

}  // namespace lacuna
