// `calibrate` and what the other commands do with its thresholds.
#include <filesystem>
#include <fstream>

#include "models.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

const std::string kText = fixture("text_model/sample.txt");

/// A model of its own, so that the side file lies in a folder that goes away.
struct Folder {
  TempDir dir;
  std::string model = dir.file("m.gguf");
  Folder() { std::filesystem::copy_file(fixture("text_model.gguf"), model); }
  std::vector<std::string> calibrate(std::vector<std::string> more = {}) const {
    std::vector<std::string> out = {"calibrate",
                                    model,
                                    "--text",
                                    kText,
                                    "--tokens",
                                    "64",
                                    "--ctx",
                                    "32",
                                    "--search-windows",
                                    "1",
                                    "--search-window",
                                    "16",
                                    "--sensitivity-tokens",
                                    "16"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

TEST(Calibrate, StoresEveryLevelAndTheOthersUseIt) {
  const Folder folder;
  std::vector<std::string> arguments =
      folder.calibrate({"--mode", "both,layered", "--criterion", "both", "--held-out", kText, "--json"});
  const auto rows = json_lines(output_of(arguments));
  ASSERT_EQ(rows.size(), 3u * 2 * 4);
  for (const auto& row : rows) {
    EXPECT_NEAR(row["calibration"]["act_sparsity"], row["level"], 0.02) << row["mode"];
    EXPECT_TRUE(row.contains("held_out"));
    EXPECT_EQ(row["path"], folder.dir.file("m.thresholds.gguf"));
  }
  for (const char* asked : {"0.5", "50"}) {
    const auto ppl =
        json_of({"perplexity", folder.model, "-f", kText, "--ctx", "16", "--chunks", "2", "--act-sparsity", asked});
    EXPECT_EQ(ppl["act_mode"], "layered") << "the best one that is stored";
    EXPECT_NEAR(ppl["act_sparsity"], 0.5, 0.15);
    EXPECT_EQ(ppl["dense_prefix"], 4);
    EXPECT_EQ(ppl["act_sparsity_asked"], 0.5);
    EXPECT_EQ(ppl["act_sparsity_layers"].size(), ppl["act_sparsity_layers_calibrated"].size());
    EXPECT_EQ(ppl["act_sparsity_within"].get<bool>(), ppl["act_sparsity_note"] == "");
  }
  const auto dense = json_of({"perplexity", folder.model, "-f", kText, "--ctx", "16", "--chunks", "2", "--dense"});
  EXPECT_EQ(dense["act_sparsity"], 0.0);
  const auto ran = json_of({"run", folder.model, "-p", "a", "-n", "8", "--ignore-eos", "--act-sparsity", "0.25",
                            "--act-mode", "uniform", "--criterion", "wina", "--dense-prefix", "0"});
  EXPECT_GT(ran["act_sparsity"], 0.05);
  const auto bench = json_of({"bench", folder.model, "--what", "decode", "--gen", "4", "--runs", "2", "--act-sparsity",
                              "40", "--dense-prefix", "0"});
  EXPECT_GT(bench["act_sparsity"], 0.1);
  const auto both = json_lines(output_of({"bench", folder.model, "--what", "decode", "--gen", "4", "--runs", "2",
                                          "--act-sparsity", "40", "--dense-prefix", "0", "--beside-dense", "--json"}));
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0]["act_sparsity"], 0.0);
  EXPECT_GT(both[1]["act_sparsity"], 0.1);
  expect_error({"run", folder.model, "-p", "a", "--act-sparsity", "0.3"}, "stored are: uniform magnitude 25%, 40%");
}

TEST(Calibrate, HeldOutIsWhatASparseModelLeavesOut) {
  const Folder folder;
  const auto rows =
      json_lines(output_of(folder.calibrate({"--mode", "uniform", "--criterion", "both", "--sparse-tokens", "64",
                                             "--held-out", kText, "--levels", "50", "--json"})));
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& row : rows) {
    // Windows of 32 behind their first 4 positions, as perplexity runs the same 64 tokens.
    EXPECT_NEAR(row["held_out"]["act_sparsity"], row["calibration"]["act_sparsity"], 0.1);
    const auto ppl = json_of({"perplexity", folder.model, "-f", kText, "--ctx", "32", "--chunks", "2", "--act-sparsity",
                              "50", "--criterion", row["criterion"], "--protocol", "hf"});
    EXPECT_NEAR(row["held_out"]["act_sparsity"], ppl["act_sparsity"], 0.02) << row["criterion"];
  }
}

// Thresholds of groups: calibrate, then perplexity (masked) and run (whole groups are not read) of a gs model.
TEST(Calibrate, GroupsOfInputsAreLeftOutTogether) {
  const Folder folder;
  const std::string gs = folder.dir.file("gs.gguf");
  output_of({"quantize", folder.model, "-o", gs, "--layout", "gs4", "--group-size", "8"});
  auto arguments = folder.calibrate({"--mode", "both,layered", "--levels", "50", "--group", "8", "--json"});
  arguments[1] = gs;
  const auto rows = json_lines(output_of(arguments));
  ASSERT_EQ(rows.size(), 3u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["group"], 8);
    EXPECT_NEAR(row["calibration"]["act_sparsity"], 0.5, 0.1) << row["mode"];
    const auto ppl = json_of({"perplexity", gs, "-f", kText, "--ctx", "32", "--chunks", "2", "--act-sparsity", "50",
                              "--act-mode", row["mode"]});
    EXPECT_NEAR(ppl["act_sparsity"], 0.5, 0.2) << row["mode"];
  }
  const auto ran = json_of({"run", gs, "-p", "a", "-n", "8", "--ignore-eos", "--act-sparsity", "50"});
  EXPECT_GT(ran["act_sparsity"], 0.2);
  // Thresholds of single inputs: allowed, with a word.
  auto single = folder.calibrate({"--mode", "uniform", "--levels", "50"});
  single[1] = gs;
  output_of(single);
  const auto warned = run_lacuna({"run", gs, "-p", "a", "-n", "2", "--act-sparsity", "50"});
  EXPECT_EQ(warned.code, 0);
  EXPECT_NE(warned.err.find("read in groups of 8 inputs, the thresholds leave out 1"), std::string::npos) << warned.err;
}

TEST(Calibrate, RefusesWhatCannotBeDoneBeforeTheWork) {
  const Folder folder;
  expect_error(folder.calibrate({"--skip", "32"}), "windows of 32 tokens, of which the first 32 are left out");
  expect_error(folder.calibrate({"-o", folder.dir.file("no/t.thresholds.gguf")}), "there is no folder");
  expect_error(folder.calibrate({"--histograms", folder.dir.file("no/h.svg")}), "there is no folder");
  EXPECT_FALSE(std::filesystem::exists(folder.dir.file("m.thresholds.gguf")));
}

TEST(Calibrate, IntoTheModelItself) {
  const Folder folder;
  const std::string out = folder.dir.file("with.gguf");
  output_of(folder.calibrate({"-o", out, "--mode", "uniform", "--levels", "30,60"}));
  EXPECT_FALSE(std::filesystem::exists(folder.dir.file("m.thresholds.gguf")));
  const auto before = json_of({"run", folder.model, "-p", "a", "-n", "4"}),
             after = json_of({"run", out, "-p", "a", "-n", "4"});
  EXPECT_EQ(before["ids"], after["ids"]);
  EXPECT_GT(json_of({"run", out, "-p", "a", "-n", "12", "--ignore-eos", "--act-sparsity", "60"})["act_sparsity"], 0.1);
}

TEST(Calibrate, ThresholdsOfAnotherModelAreRefused) {
  const Folder folder;
  output_of(folder.calibrate({"--mode", "uniform"}));
  write_tiny_model(folder.dir.file("other.gguf"));
  expect_error({"run", fixture("hf/opt"), "--prompt-ids", "3", "--act-sparsity", "50", "--thresholds",
                folder.dir.file("m.thresholds.gguf")},
               "calibrate this model");
  expect_error({"run", folder.dir.file("other.gguf"), "-p", "a", "--act-sparsity", "50"}, "lacuna calibrate");
}

// Before anything is written, and not on the CPU instead.
TEST(Calibrate, OnCudaRefusesWhatRunsOnTheCpuAlone) {
  const Folder folder;
  expect_error(folder.calibrate({"--device", "cuda", "--group", "8"}), "--group finds thresholds for the CPU");
  expect_error(folder.calibrate({"--gpu", "1"}), "--gpu needs --device cuda");
  auto opt = folder.calibrate({"--device", "cuda", "-o", folder.dir.file("m.thresholds.gguf")});
  opt[1] = fixture("hf/opt");
  expect_error(opt, "");  // no card, or learned positions
  EXPECT_FALSE(std::filesystem::exists(folder.dir.file("m.thresholds.gguf")));
  const std::string help = output_of({"calibrate", "--help"});
  for (const char* flag : {"--gpu ", "--gpu-memory", "--device"}) EXPECT_NE(help.find(flag), std::string::npos) << flag;
}

TEST(Calibrate, BadTextsLeaveNothing) {
  const Folder folder;
  std::ofstream(folder.dir.file("short.txt")) << "a";
  std::vector<std::string> arguments = folder.calibrate();
  arguments[3] = folder.dir.file("short.txt");
  const Finished done = run_lacuna(arguments);
  EXPECT_EQ(done.code, 1);
  EXPECT_NE(done.err.find("calibration needs"), std::string::npos) << done.err;
  EXPECT_FALSE(std::filesystem::exists(folder.dir.file("m.thresholds.gguf")));
  expect_error(folder.calibrate({"--histograms", folder.dir.file("h.png")}), ".json or .svg");
}

TEST(Sweep, OneRowForEachLevel) {
  const Folder folder;
  output_of(folder.calibrate({"--histograms", folder.dir.file("h.json")}));
  const auto histograms = nlohmann::json::parse(read_text(folder.dir.file("h.json")));
  ASSERT_FALSE(histograms["rows"].empty());
  int64_t counted = 0;
  for (const int64_t count : histograms["rows"][0]["counts"]) counted += count;
  EXPECT_EQ(counted, histograms["rows"][0]["values"]);
  output_of(folder.calibrate({"--histograms", folder.dir.file("h.svg")}));
  EXPECT_TRUE(read_text(folder.dir.file("h.svg")).ends_with("</svg>\n"));

  const std::vector<std::string> sweep = {"perplexity", folder.model, "-f", kText,    "--ctx",
                                          "16",         "--chunks",   "2",  "--sweep"};
  std::vector<std::string> files = sweep;
  files.insert(files.end(), {"--json", "--output", folder.dir.file("s.json"), "--svg", folder.dir.file("s.svg")});
  const auto rows = json_lines(output_of(files));
  ASSERT_EQ(rows.size(), 1u + 2 * 4);
  EXPECT_EQ(rows[0]["act_mode"], "dense");
  EXPECT_EQ(nlohmann::json::parse(read_text(folder.dir.file("s.json")))["rows"].size(), rows.size());
  EXPECT_TRUE(read_text(folder.dir.file("s.svg")).starts_with("<svg"));
  EXPECT_NE(output_of(sweep).find("greedy   magnitude     65%"), std::string::npos);
  std::vector<std::string> both = sweep;
  both.insert(both.end(), {"--json", "--dense-prefix", "0,4", "--act-sparsity", "50"});
  const auto prefixes = json_lines(output_of(both));
  ASSERT_EQ(prefixes.size(), 1u + 2 * 2);
  EXPECT_EQ(prefixes[1]["dense_prefix"], 0);
  EXPECT_EQ(prefixes[4]["dense_prefix"], 4);
  EXPECT_NE(prefixes[1]["ppl"], prefixes[3]["ppl"]) << "the first positions matter";
  expect_error({"perplexity", folder.model, "-f", kText, "--ctx", "16", "--dense-prefix", "0,4"}, "with --sweep");
}

}  // namespace
}  // namespace lacuna::test
