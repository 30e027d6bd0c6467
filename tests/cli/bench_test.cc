// `bench`: its file of random weights leaves nothing behind; random weights get thresholds.
#include <gmock/gmock.h>

#include <sstream>

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

// gs weights are left out by groups: alone (random ones) and with the thresholds of random tokens.
TEST(Bench, GroupsOfAGroupSparseShapeAreLeftOut) {
  const TempDir dir;
  const Finished done = run_lacuna({"bench",
                                    "--synthetic",
                                    "llama-3.2-1b",
                                    "--layers",
                                    "1",
                                    "--layout",
                                    "gs4",
                                    "--weight-sparsity",
                                    "50",
                                    "--what",
                                    "linear,decode",
                                    "--gen",
                                    "8",
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
                                    "40",
                                    "--explain"});
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_THAT(done.err, testing::HasSubstr("skips 16 inputs together"));
  std::istringstream lines(done.out);
  int found = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row["bench"] == "head") continue;
    EXPECT_NEAR(row["act_sparsity"].get<double>(), 0.4, 0.1) << row["bench"];
    ++found;
  }
  EXPECT_EQ(found, 2);
}

TEST(Bench, SpqtReportOfAModel) {
  const TempDir dir;
  write_tiny_model(dir.file("tiny.gguf"), layout::Id::q8_0);
  const Finished done = run_lacuna({"bench", dir.file("tiny.gguf"), "--spqt", "--parts", "table2,fig7", "--json",
                                    "--runs", "2", "--gen", "4", "--threads", "2", "--svg", dir.file("out.svg")});
  ASSERT_EQ(done.code, 0) << done.err;
  std::vector<std::string> seen;
  double q4_K_ms = 0;
  std::istringstream lines(done.out);
  for (std::string line; std::getline(lines, line);) {
    const auto row = nlohmann::json::parse(line);
    EXPECT_EQ(row["bench"], "spqt");
    seen.push_back(row["part"].get<std::string>() + " " + row["variant"].get<std::string>());
    if (row.contains("note")) continue;
    EXPECT_TRUE(row["checked"].get<bool>()) << line;
    EXPECT_GT(row["gflops"].get<double>(), 0) << line;
    if (seen.back() == "table2 q4_K") q4_K_ms = row["median_ms"].get<double>();
    if (seen.back() == "table2 zz4_k dense") {
      EXPECT_NEAR(row["speedup"].get<double>(), q4_K_ms / row["median_ms"].get<double>(), 1e-9);
    }
    if (seen.back() == "table2 uniform 50%") {  // 4 tokens of two layers, inputs of 32 and 64
      EXPECT_NEAR(row["act_sparsity"].get<double>(), 0.5, 0.15) << line;
    }
  }
  // No greedy thresholds are stored; B1 needs inputs in blocks of 256.
  EXPECT_THAT(seen, testing::ElementsAre("table2 f16", "table2 q4_K", "table2 zz4_k dense", "table2 uniform 25%",
                                         "table2 uniform 40%", "table2 uniform 50%", "table2 greedy", "fig7 q4_K",
                                         "fig7 zz4_k dense", "fig7 B2 50%", "fig7 zz4_k 50%"));
  EXPECT_THAT(read_text(dir.file("out.svg")), testing::HasSubstr("Figure 7"));
  EXPECT_EQ(names_below(dir.path()).size(), 2u);
}

TEST(Bench, SpqtReportRefusesWhatItCannotDo) {
  const Finished model = run_lacuna({"bench", "--spqt", "--parts", "table2"});
  EXPECT_NE(model.code, 0);
  EXPECT_THAT(model.err, testing::HasSubstr("give MODEL or --synthetic SHAPE"));
  const Finished part = run_lacuna({"bench", "--spqt", "--parts", "fig6"});
  EXPECT_NE(part.code, 0);
  EXPECT_THAT(part.err, testing::HasSubstr("fig10"));
  const Finished shape = run_lacuna({"bench", "--spqt", "--synthetic", "llama-9", "--parts", "fig7"});
  EXPECT_NE(shape.code, 0);
  EXPECT_THAT(shape.err, testing::HasSubstr("llama-3.2-1b"));
}

}  // namespace
}  // namespace lacuna::test
