// `bench`: its file of random weights leaves nothing behind.
#include "models.h"
#include "process.h"

namespace lacuna::test {
namespace {

std::vector<std::string> names_below(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code gone;  // files go while they are listed
  for (std::filesystem::recursive_directory_iterator at(folder, gone), end; !gone && at != end; at.increment(gone))
    names.push_back(at->path().filename().string());
  return names;
}

std::vector<std::string> synthetic_bench(const TempDir& dir) {
  return {"bench", "--synthetic", "llama-3.2-1b",     "--layers", "1",         "--what", "decode",
          "--gen", "100000",      "--runs",           "1",        "--context", "16",     "--threads",
          "1",     "--scratch",   dir.path().string()};
}

TEST(Bench, ASignalWhileTheWeightsAreWrittenLeavesNothing) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TempDir dir;
    bool seen = false;
    const Finished done =
        run_lacuna(synthetic_bench(dir), {.end_when =
                                              [&] {
                                                for (const std::string& name : names_below(dir.path()))
                                                  if (name.ends_with(".partial")) seen = true;
                                                return seen;
                                              },
                                          .end_signal = signal});
    EXPECT_TRUE(seen) << done.err;
    EXPECT_EQ(done.signal, signal) << done.err;
    EXPECT_EQ(names_below(dir.path()), std::vector<std::string>{});
  }
}

TEST(Bench, OnceWrittenTheWeightsHaveNoName) {
  const TempDir dir;
  bool seen = false;
  const Finished done = run_lacuna(synthetic_bench(dir), {.end_when =
                                                              [&] {
                                                                const bool there = !names_below(dir.path()).empty();
                                                                seen = seen || there;
                                                                return seen && !there;
                                                              },
                                                          .end_signal = SIGKILL});
  EXPECT_TRUE(seen) << done.err;
  EXPECT_EQ(done.signal, SIGKILL) << "it ended before it was killed: " << done.err;
  EXPECT_EQ(names_below(dir.path()), std::vector<std::string>{});
}

}  // namespace
}  // namespace lacuna::test
