#include "core/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

namespace lacuna {
namespace {

/// stderr goes to `fd` while the object lives.
class StderrTo {
 public:
  explicit StderrTo(int fd) : saved_(::dup(STDERR_FILENO)) {
    std::fflush(stderr);
    ::dup2(fd, STDERR_FILENO);
  }
  ~StderrTo() {
    std::fflush(stderr);
    ::dup2(saved_, STDERR_FILENO);
    ::close(saved_);
  }

 private:
  int saved_;
};

/// What can be read from fd without waiting.
std::string drain(int fd) {
  std::string out;
  char buffer[4096];
  pollfd ready{fd, POLLIN, 0};
  while (::poll(&ready, 1, 0) > 0 && (ready.revents & POLLIN)) {
    const ssize_t n = ::read(fd, buffer, sizeof(buffer));
    if (n <= 0) break;
    out.append(buffer, size_t(n));
  }
  return out;
}

void work(int64_t total) {
  Progress progress("Reading", total, "B");
  for (int i = 0; i < 3; ++i) {
    progress.add(int64_t{25} << 20);
    std::this_thread::sleep_for(std::chrono::milliseconds(110));
  }
}

TEST(Progress, SilentInAPipe) {
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  {
    const StderrTo redirect(fds[1]);
    work(int64_t{100} << 20);
  }
  EXPECT_EQ(drain(fds[0]), "");
  ::close(fds[0]);
  ::close(fds[1]);
}

TEST(Progress, DrawsOnATerminalAndClearsItsLine) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(::grantpt(terminal), 0);
  ASSERT_EQ(::unlockpt(terminal), 0);
  const int screen = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
  ASSERT_GE(screen, 0);
  std::string known, unknown;
  {
    const StderrTo redirect(screen);
    work(int64_t{100} << 20);
    known = drain(terminal);
    work(0);
    unknown = drain(terminal);
  }
  EXPECT_THAT(known, testing::HasSubstr("Reading ["));
  EXPECT_THAT(known, testing::HasSubstr(" 75%"));
  EXPECT_THAT(known, testing::HasSubstr(" MiB/s"));
  EXPECT_THAT(known, testing::HasSubstr(" left"));
  EXPECT_THAT(known, testing::EndsWith("\r\x1b[K"));
  EXPECT_THAT(unknown, testing::HasSubstr("Reading 75.0 MiB"));
  EXPECT_THAT(unknown, testing::Not(testing::HasSubstr("%")));
  EXPECT_THAT(unknown, testing::EndsWith("\r\x1b[K"));
  ::close(screen);
  ::close(terminal);
}

}  // namespace
}  // namespace lacuna
