// tests/host_device/clock.h - what the host's stopwatches show.
#pragma once

#include <functional>

#include "kernels/cuda/groups.h"

namespace lacuna::test {

struct Clock {
  double ms = 0;  // since a stopwatch was started
  /// Milliseconds of a group-sparse product; empty: they take no time.
  std::function<double(const cuda::GroupsPlan&, const cuda::Groups&)> of_groups;
};

inline Clock& clock() {
  static Clock now;
  return now;
}

}  // namespace lacuna::test
