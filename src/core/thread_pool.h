// src/core/thread_pool.h - fork-join workers for kernels: one job at a time, every worker takes part, the caller is
// worker 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace lacuna {

/// Workers spin for a few microseconds between jobs, then sleep, so that the joins inside one token cost little and an
/// idle program costs nothing. Not reentrant: a job must not start another one on the same pool.
class ThreadPool {
 public:
  /// threads >= 1, the caller included. 0: one per core that this process may use. Throws Error when the system starts
  /// no more.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return int(threads_.size()) + 1; }

  /// Calls job(worker) once on every worker, worker in [0, size()), and returns when all have returned. The first
  /// exception thrown by a job is rethrown here after the join.
  template <class Job>
  void run(Job&& job) {
    using Fn = std::remove_reference_t<Job>;
    dispatch([](void* context, int worker) { (*static_cast<Fn*>(context))(worker); },
             const_cast<void*>(static_cast<const void*>(&job)));
  }

  /// Calls body(begin, end) on chunks of at most `grain` indices of [0, count); chunks are taken in order by whoever is
  /// free.
  template <class Body>
  void parallel_for(int64_t count, int64_t grain, Body&& body) {
    if (count <= 0) return;
    if (size() == 1 || count <= grain) {
      body(int64_t{0}, count);
      return;
    }
    std::atomic<int64_t> next{0};
    run([&](int) {
      for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < count;)
        body(begin, begin + grain < count ? begin + grain : count);
    });
  }

 private:
  using JobFn = void (*)(void* context, int worker);
  void dispatch(JobFn fn, void* context);
  void worker_loop(int worker);
  void call(int worker) noexcept;
  void stop();  // and join

  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<bool> stop_{false};
  JobFn job_ = nullptr;
  void* context_ = nullptr;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

/// Cores that this process may use (its affinity mask), at least 1.
int usable_cores();

}  // namespace lacuna
