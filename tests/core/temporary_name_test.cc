#include "core/temporary_name.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "test_support.h"

namespace lacuna::test {
namespace {

/// Runs `body` in a child process, which then gets the signal; returns the signal that ended it, 0: none.
template <class Body>
int signal_that_ends(int signal, Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body([signal] { ::raise(signal); });
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST(TemporaryName, GoesWithASignalAndOnlyWhileItLives) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TempDir dir;
    const std::string folder = dir.file("folder"), inside = folder + "/inside", finished = dir.file("finished");
    const int ended = signal_that_ends(signal, [&](const auto& raise) {
      remove_temporaries_on_signals();
      { const TemporaryName before(finished); }
      std::filesystem::create_directory(folder);
      const TemporaryName outer(folder), inner(inside);
      for (const std::string& path : {finished, inside}) std::ofstream(path) << "x";
      raise();
    });
    EXPECT_EQ(ended, signal);
    EXPECT_TRUE(std::filesystem::exists(finished));
    EXPECT_FALSE(std::filesystem::exists(folder));
  }
}

TEST(TemporaryName, AFolderThatIsNotEmptyStays) {
  const TempDir dir;
  EXPECT_EQ(signal_that_ends(SIGTERM,
                             [&](const auto& raise) {
                               remove_temporaries_on_signals();
                               std::ofstream(dir.file("user's")) << "x";
                               const TemporaryName name(dir.path().string());
                               raise();
                             }),
            SIGTERM);
  EXPECT_TRUE(std::filesystem::exists(dir.file("user's")));
}

TEST(TemporaryName, AnIgnoredSignalStaysIgnored) {
  const TempDir dir;
  std::ofstream(dir.file("a")) << "x";
  EXPECT_EQ(signal_that_ends(SIGHUP,
                             [&](const auto& raise) {
                               std::signal(SIGHUP, SIG_IGN);  // as nohup does
                               remove_temporaries_on_signals();
                               const TemporaryName name(dir.file("a"));
                               raise();
                             }),
            0);
  EXPECT_TRUE(std::filesystem::exists(dir.file("a")));
}

TEST(TemporaryName, MoreThanFitAreLeftAlone) {
  const TempDir dir;
  EXPECT_EQ(signal_that_ends(SIGTERM,
                             [&](const auto& raise) {
                               remove_temporaries_on_signals();
                               std::vector<std::unique_ptr<TemporaryName>> names;
                               names.push_back(std::make_unique<TemporaryName>(std::string(100000, 'x')));
                               for (int i = 0; i < 33; ++i) {
                                 const std::string path = dir.file(std::to_string(i));
                                 std::ofstream(path.c_str()) << "x";
                                 names.push_back(std::make_unique<TemporaryName>(path));
                               }
                               names.erase(names.begin() + 1);  // its place is free again
                               std::ofstream(dir.file("late")) << "x";
                               names.push_back(std::make_unique<TemporaryName>(dir.file("late")));
                               raise();
                             }),
            SIGTERM);
  for (const char* stays : {"0", "32"}) EXPECT_TRUE(std::filesystem::exists(dir.file(stays))) << stays;
  for (const char* goes : {"1", "31", "late"}) EXPECT_FALSE(std::filesystem::exists(dir.file(goes))) << goes;
}

}  // namespace
}  // namespace lacuna::test
