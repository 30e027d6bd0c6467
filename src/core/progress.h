// src/core/progress.h - a progress bar on stderr: bar, rate, time left. Quiet when stderr is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace lacuna {

class Progress {
 public:
  /// total <= 0: unknown, only the count and the rate are shown. unit: "B" (printed as MiB), "tensors", "tokens", ...
  Progress(std::string what, int64_t total, std::string unit);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Adds to the amount done; redraws at most ten times a second. Not thread-safe.
  void add(int64_t amount);
  void set(int64_t done);
  /// Clears the line until the next add or set, so that others can print.
  void hide();

 private:
  void draw();
  using Clock = std::chrono::steady_clock;
  std::string what_, unit_;
  int64_t total_, done_ = 0;
  Clock::time_point start_, drawn_;
  bool terminal_, dirty_ = false;
};

}  // namespace lacuna
