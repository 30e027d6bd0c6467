// tests/host_device/nccl/nccl.h - what tests see of the library in the place of NCCL.
#pragma once

#include <atomic>
#include <functional>

inline constexpr int kFakeRemoteError = 6;

struct FakeComm {
  int rank, count;
};
struct FakeNccl {
  int failing_rank = -1;  // an exchange of this one fails after it began
  int refused_rank = -1;  // a call of this one fails
  int open_groups = 0;
  std::function<void(std::function<void()>)> enqueue;  // the work of an exchange; empty: it is done at once
  std::atomic<int> alive = 0, destroyed = 0, aborted = 0;
};
