#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace lacuna {
namespace {

TEST(ThreadPool, EveryWorkerRunsEachJobOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.size(), threads);
    std::vector<int> calls(size_t(threads), 0);  // each worker has its own element
    for (int job = 0; job < 100; ++job) pool.run([&](int worker) { ++calls[size_t(worker)]; });
    EXPECT_EQ(calls, std::vector<int>(size_t(threads), 100));
  }
}

TEST(ThreadPool, WorkersAreDifferentThreadsAndTheCallerIsWorkerZero) {
  ThreadPool pool(4);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::thread::id zero;
  pool.run([&](int worker) {
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
    if (worker == 0) zero = std::this_thread::get_id();
  });
  EXPECT_EQ(ids.size(), 4u);
  EXPECT_EQ(zero, std::this_thread::get_id());
}

TEST(ThreadPool, ZeroThreadsMeansTheUsableCores) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_EQ(ThreadPool(0).size(), usable_cores());
}

TEST(ThreadPool, ParallelForTakesEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 2, 63, 64, 65, 1000})
      for (const int64_t grain : {1, 7, 64, 5000}) {
        std::vector<std::atomic<int>> taken(size_t(count) + 1);
        std::atomic<bool> within{true};
        pool.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          // One worker alone takes all at once.
          if (begin < 0 || end > count || begin >= end || (threads > 1 && end - begin > grain)) within = false;
          for (int64_t i = begin; i < end; ++i) taken[size_t(i)].fetch_add(1);
        });
        EXPECT_TRUE(within) << threads << " " << count << " " << grain;
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(taken[size_t(i)], 1) << i;
        ASSERT_EQ(taken.back(), 0);
      }
  }
}

// What the kernels do: many short jobs back to back; what one job wrote is seen by all workers of the next.
TEST(ThreadPool, ManyTinyJobs) {
  constexpr int kThreads = 3, kJobs = 1500;
  ThreadPool pool(kThreads);
  std::vector<int64_t> now(kThreads, 1), next(kThreads, 0);
  for (int job = 0; job < kJobs; ++job) {
    pool.run([&](int worker) {
      int64_t total = 0;
      for (const int64_t value : now) total += value;
      next[size_t(worker)] = total % 1000003;
    });
    std::swap(now, next);
  }
  int64_t expected = 1;
  for (int job = 0; job < kJobs; ++job) expected = expected * kThreads % 1000003;
  EXPECT_EQ(now, std::vector<int64_t>(kThreads, expected));
}

TEST(ThreadPool, WakesWorkersThatWentToSleep) {
  ThreadPool pool(3);
  for (int job = 0; job < 5; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> calls{0};
    pool.run([&](int) { calls.fetch_add(1); });
    EXPECT_EQ(calls, 3);
  }
}

TEST(ThreadPool, WaitsForTheSlowest) {
  ThreadPool pool(3);
  std::atomic<int> done{0};
  pool.run([&](int worker) {
    std::this_thread::sleep_for(std::chrono::milliseconds(worker == 2 ? 20 : 0));
    done.fetch_add(1);
  });
  EXPECT_EQ(done, 3);
}

TEST(ThreadPool, RethrowsAndGoesOn) {
  ThreadPool pool(3);
  for (const int thrower : {0, 1, 2, -1}) {  // -1: all of them
    std::atomic<int> calls{0};
    std::string caught;
    try {
      pool.run([&](int worker) {
        calls.fetch_add(1);
        if (worker == thrower || thrower == -1) throw std::runtime_error("from a worker");
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    EXPECT_EQ(caught, "from a worker") << thrower;
    EXPECT_EQ(calls, 3) << "the join waits for all workers";
    calls = 0;
    EXPECT_NO_THROW(pool.run([&](int) { calls.fetch_add(1); })) << "an error is reported once";
    EXPECT_EQ(calls, 3);
  }
  EXPECT_THROW(pool.parallel_for(100, 1,
                                 [](int64_t begin, int64_t) {
                                   if (begin == 50) throw std::logic_error("50");
                                 }),
               std::logic_error);
  EXPECT_THROW(ThreadPool(1).run([](int) { throw std::logic_error("alone"); }), std::logic_error);
}

TEST(ThreadPool, ComesAndGoes) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 2) pool.run([](int) {});
  }
}

}  // namespace
}  // namespace lacuna
