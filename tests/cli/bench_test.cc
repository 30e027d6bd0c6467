// `bench`: its file of random weights leaves nothing behind; random weights get thresholds.
#include <gmock/gmock.h>

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

TEST(Bench, RandomWeightsDecodeWithThresholdsOfTheirOwn) {
  const TempDir dir;
  std::vector<std::string> arguments = {"bench",
                                        "--synthetic",
                                        "llama-3.2-1b",
                                        "--layers",
                                        "1",
                                        "--layout",
                                        "zz4_k",
                                        "--what",
                                        "decode",
                                        "--gen",
                                        "16",
                                        "--runs",
                                        "1",
                                        "--context",
                                        "10",
                                        "--threads",
                                        "2",
                                        "--scratch",
                                        dir.path().string(),
                                        "--json",
                                        "--act-sparsity",
                                        "40"};
  const Finished done = run_lacuna(arguments);
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_THAT(done.err, testing::HasSubstr("random tokens"));
  const auto row = nlohmann::json::parse(done.out);
  EXPECT_EQ(row["bench"], "decode");
  EXPECT_NEAR(row["act_sparsity"].get<double>(), 0.4, 0.05);  // 16 tokens of one layer: four inputs of 2048 to 8192
  EXPECT_GT(row["median_ms"].get<double>(), 0);

  arguments.insert(arguments.end(), {"--act-mode", "greedy"});
  const Finished refused = run_lacuna(arguments);
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, testing::HasSubstr("uniform thresholds by magnitude only"));
}

}  // namespace
}  // namespace lacuna::test
