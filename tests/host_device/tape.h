// tests/host_device/tape.h - a graph of the host's device: its launches, to be done again.
#pragma once

#include <functional>
#include <vector>

namespace lacuna::test {

using Tape = std::vector<std::function<void()>>;

/// Where launches go while a graph is recorded; nullptr: they are done at once.
inline Tape*& tape() {
  static Tape* now = nullptr;
  return now;
}

}  // namespace lacuna::test
