#include "core/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/say.h"

namespace lacuna {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr int kBarWidth = 24;

std::string amount(double value, const std::string& unit) {
  if (unit != "B") return fmt::format("{:.0f} {}", value, unit);
  return fmt::format("{:.1f} MiB", value / (1 << 20));
}

std::string duration(double seconds) {
  const int64_t s = std::llround(seconds);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

Progress::Progress(std::string what, int64_t total, std::string unit)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      start_(Clock::now()),
      drawn_(start_ - kRedraw),
      terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { hide(); }

void Progress::hide() {
  if (dirty_) say_text("\r\x1b[K");
  dirty_ = false;
}

void Progress::add(int64_t amount_done) { set(done_ + amount_done); }

void Progress::set(int64_t done) {
  done_ = done;
  if (terminal_ && Clock::now() - drawn_ >= kRedraw) draw();
}

void Progress::draw() {
  drawn_ = Clock::now();
  dirty_ = true;
  const double elapsed = std::chrono::duration<double>(drawn_ - start_).count();
  const double rate = elapsed > 0 ? double(done_) / elapsed : 0;
  std::string line;
  if (total_ > 0) {
    const double share = std::clamp(double(done_) / double(total_), 0.0, 1.0);
    const int filled = int(share * kBarWidth);
    line = fmt::format("{} [{:#<{}}{:.<{}}] {:3.0f}%  {}/s", what_, "", filled, "", kBarWidth - filled, share * 100,
                       amount(rate, unit_));
    if (rate > 0) line += fmt::format("  {} left", duration(double(std::max<int64_t>(0, total_ - done_)) / rate));
  } else {
    line = fmt::format("{} {}  {}/s", what_, amount(double(done_), unit_), amount(rate, unit_));
  }
  say_text("\r\x1b[K" + line);
}

}  // namespace lacuna
