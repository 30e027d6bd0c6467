// `tune`, and what run and bench do with its profile.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "models.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

const std::string kText = fixture("text_model/sample.txt");

/// A zigzag model with thresholds, and a cache folder, of its own.
struct Folder {
  TempDir dir;
  std::string model = dir.file("zz.gguf");
  RunOptions run{.environment = {{"LACUNA_CACHE", dir.file("cache")}}};
  Folder() { output_of({"quantize", fixture("text_model.gguf"), "--layout", "zz4_k", "-o", model}); }
  void calibrate() const {
    output_of({"calibrate", model, "--text", kText, "--tokens", "64", "--ctx", "32", "--search-windows", "1",
               "--search-window", "16", "--mode", "uniform"});
  }
  std::string profile() const {
    for (const auto& entry : std::filesystem::directory_iterator(dir.file("cache/profiles")))
      return entry.path().string();
    return "";
  }
  nlohmann::json read() const { return nlohmann::json::parse(read_text(profile())); }
  void write(const std::string& text) const { std::ofstream(profile(), std::ios::trunc) << text; }
  /// Every group has the default plan with this dense_below.
  void edit(double dense_below) const {
    nlohmann::json profile = read();
    for (auto& [key, group] : profile["groups"].items()) {
      group["plan"] = group["measured"][0]["plan"];
      group["plan"]["dense_below"] = dense_below;
    }
    write(profile.dump());
  }
};

std::vector<std::string> tune(const Folder& folder, std::vector<std::string> more = {}) {
  std::vector<std::string> out = {"tune", folder.model, "--seconds", "0.05", "--threads", "1"};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

TEST(Tune, StoresAProfileThatRunAndBenchUse) {
  const Folder folder;
  const auto rows = json_lines(output_of(tune(folder, {"--json", "--levels", "30,60"}), folder.run));
  ASSERT_GE(rows.size(), 3u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["path"], folder.profile());
    EXPECT_EQ(row["levels"], (std::vector<double>{0, 0.3, 0.6}));
    EXPECT_GT(row["chosen"]["dense_ms"], 0.0);
    EXPECT_EQ(row["default"]["sparse_ms"].size(), 3u);
    EXPECT_FALSE(row.contains("measured"));
    EXPECT_TRUE(folder.read()["groups"].contains(std::string(row["key"])));
  }
  const std::vector<std::string> run = {"run", folder.model, "-p", "a", "-n", "4", "--explain", "--threads", "1"};
  const Finished used = run_lacuna(run, folder.run);
  EXPECT_EQ(used.code, 0) << used.err;
  EXPECT_NE(used.err.find("profile: " + folder.profile()), std::string::npos) << used.err;
  EXPECT_NE(used.err.find("ms with 30 / 60% left out"), std::string::npos) << used.err;

  std::vector<std::string> other = run;
  other.push_back("--no-profile");
  EXPECT_NE(run_lacuna(other, folder.run).err.find("default plans (--no-profile)"), std::string::npos);
  other = run;
  other.back() = "2";
  EXPECT_NE(run_lacuna(other, folder.run).err.find("nothing was measured on this machine with 2 threads"),
            std::string::npos);
  const Finished bench = run_lacuna({"bench", folder.model, "--what", "linear", "--runs", "2", "--threads", "1",
                                     "--explain", "--profile", folder.profile()});
  EXPECT_EQ(bench.code, 0);
  EXPECT_NE(bench.err.find("profile: " + folder.profile()), std::string::npos) << bench.err;
}

TEST(Tune, ExplainPrintsEveryPlan) {
  const Folder folder;
  const std::string out = output_of(tune(folder, {"--explain", "-o", folder.dir.file("p.json")}), folder.run);
  for (const char* words : {"columns, 16 at a time, a column ahead", "columns, 64 at a time, no prefetch",
                            "default: columns, ", "25%", "65%", "skipping "})
    EXPECT_NE(out.find(words), std::string::npos) << words << "\n" << out;
  EXPECT_FALSE(std::filesystem::exists(folder.dir.file("cache")));
}

TEST(Tune, ModelsAddUpInOneProfile) {
  const Folder folder;
  const std::string other = folder.dir.file("zz6.gguf");
  output_of({"quantize", fixture("text_model.gguf"), "--layout", "zz6_k", "-o", other});
  output_of(tune(folder), folder.run);
  const size_t before = folder.read()["groups"].size();
  output_of({"tune", other, "--seconds", "0.05", "--threads", "1"}, folder.run);
  EXPECT_EQ(folder.read()["groups"].size(), 2 * before);
}

TEST(Tune, TheSwitchRunsDenseWhereSkippingIsSlower) {
  const Folder folder;
  folder.calibrate();
  output_of(tune(folder), folder.run);
  const std::vector<std::string> arguments = {"run", folder.model,   "-p",        "a", "-n",
                                              "12",  "--ignore-eos", "--threads", "1", "--act-sparsity",
                                              "50",  "--json",       "--explain"};
  folder.edit(1);
  const Finished dense = run_lacuna(arguments, folder.run);
  EXPECT_EQ(json_lines(dense.out).at(0)["act_sparsity"], 0.0);
  EXPECT_NE(dense.err.find("run dense"), std::string::npos) << dense.err;
  EXPECT_NE(dense.err.find("dense because skipping never pays here: "), std::string::npos) << dense.err;
  folder.edit(0);
  const Finished sparse = run_lacuna(arguments, folder.run);
  EXPECT_GT(json_lines(sparse.out).at(0)["act_sparsity"], 0.1);
  EXPECT_NE(sparse.err.find("run sparse"), std::string::npos) << sparse.err;
  EXPECT_EQ(sparse.err.find("run dense"), std::string::npos) << sparse.err;

  folder.edit(0.6);
  const auto linear = [&](const char* sparsity) {
    return json_lines(output_of({"bench", folder.model, "--what", "linear", "--runs", "2", "--threads", "1",
                                 "--act-sparsity", sparsity, "--json"},
                                folder.run))
        .at(0)["act_sparsity"]
        .get<double>();
  };
  EXPECT_EQ(linear("50"), 0);
  EXPECT_GT(linear("65"), 0.4);
}

TEST(Tune, DamagedAndStaleProfilesAreIgnoredWithOneLine) {
  const Folder folder;
  output_of(tune(folder), folder.run);
  const nlohmann::json good = folder.read();
  const std::vector<std::string> run = {"run", folder.model, "-p", "a", "-n", "2", "--json", "--threads", "1"};
  const auto expect = [&](const std::string& text, const std::string& words) {
    folder.write(text);
    const Finished done = run_lacuna(run, folder.run);
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_EQ(json_lines(done.out).size(), 1u);
    EXPECT_NE(done.err.find("the profile is not used: "), std::string::npos) << done.err;
    EXPECT_NE(done.err.find(words), std::string::npos) << done.err;
    EXPECT_NE(done.err.find("make a new one with `lacuna tune MODEL`"), std::string::npos) << done.err;
    EXPECT_EQ(std::count(done.err.begin(), done.err.end(), '\n'), 2) << done.err;  // and the statistics
  };
  expect("", "bad JSON");
  expect(good.dump().substr(0, 300), "bad JSON");
  expect(std::string(1 << 20, '['), "nested deeper");
  expect("{\"lacuna_profile\": \"\\u001b[2J\"}", "must be an integer");
  nlohmann::json other = good;
  other["version"] = "0.0.1\n\x1b[2J";
  expect(other.dump(), "is of version");
  other = good;
  other["cpu"] = "abacus";
  expect(other.dump(), "is of CPU \"abacus\"");
  other = good;
  other["threads"] = 64;
  expect(other.dump(), "is for 64 threads");
  other = good;
  other["groups"].begin().value()["plan"]["chunk"] = 1e18;
  expect(other.dump(), "must be an integer");
  other = good;
  other["groups"].begin().value()["plan"]["tile_rows"] = 77;
  expect(other.dump(), "tile_rows = 77");

  folder.write("{");
  const Finished again = run_lacuna(tune(folder), folder.run);
  EXPECT_EQ(again.code, 0);
  EXPECT_NE(again.err.find("what was there is replaced"), std::string::npos) << again.err;
  EXPECT_EQ(folder.read()["threads"], 1);
}

TEST(Tune, AFileCanHaveThisMachinesTiles) {
  constexpr model::ModelShape kWide{.name = "wide",
                                    .architecture = "llama",
                                    .n_layers = 2,
                                    .n_embd = 512,
                                    .n_heads = 8,
                                    .n_kv_heads = 4,
                                    .head_dim = 64,
                                    .n_ff = 1280,
                                    .n_vocab = 300,
                                    .n_ctx = 256,
                                    .norm_eps = 1e-5,
                                    .rope_base = 10000,
                                    .rope_factor = 1,
                                    .tied = false,
                                    .qkv_bias = false};
  const TempDir dir;
  const std::string whole = dir.file("whole.gguf"), tiled = dir.file("tiled.gguf");
  const RunOptions run{.environment = {{"LACUNA_CACHE", dir.file("cache")}}};
  write_model(kWide, whole, layout::Id::zz4_k, layout::Id::q6_K);
  const std::vector<std::string> quantize = {"quantize", whole, "--layout", "zz4_k",     "--tile-rows",
                                             "auto",     "-o",  tiled,      "--threads", "1"};
  expect_error(quantize, "needs a profile of this machine with 1 threads", run);
  output_of({"tune", whole, "--seconds", "0.05", "--threads", "1"}, run);
  const std::string path = std::filesystem::directory_iterator(dir.file("cache/profiles"))->path().string();
  nlohmann::json profile = nlohmann::json::parse(read_text(path));
  for (auto& [key, group] : profile["groups"].items())
    for (const auto& times : group["measured"])
      if (times["plan"]["tile_rows"] == (group["name"] == "ffn_gate+ffn_up" ? 1024 : 256))
        group["plan"] = times["plan"];
  std::ofstream(path, std::ios::trunc) << profile.dump();

  EXPECT_NE(output_of(quantize, run), "");
  const auto inspected = json_of({"inspect", tiled});
  for (const auto& tensor : inspected["tensors"]) {
    const std::string name = tensor["name"];
    if (tensor["layout"] == "zz4_k") {
      EXPECT_EQ(tensor["tile_rows"],
                name.find("ffn_gate") != std::string::npos || name.find("ffn_up") != std::string::npos ? 1024 : 256)
          << name;
    }
  }
  // The same weights, whichever way they are read.
  std::vector<std::string> generate = {"run", whole,          "--prompt-ids", "5,6,7", "-n",
                                       "4",   "--ignore-eos", "--threads",    "1"};
  const auto expected = json_of(generate, run)["ids"];
  generate[1] = tiled;
  EXPECT_EQ(json_of(generate, run)["ids"], expected);
  generate.insert(generate.end(), {"--prepare", "in_place", "--explain"});
  const auto done = run_lacuna(generate, run);
  EXPECT_EQ(done.code, 0);
  EXPECT_NE(done.err.find("zz4_k in place, "), std::string::npos) << done.err;
  generate.pop_back();
  EXPECT_EQ(json_of(generate, run)["ids"], expected);
  expect_error({"quantize", whole, "--layout", "q4_K", "--tile-rows", "auto", "-o", tiled}, "q4_K has no tiles", run);
  expect_usage_error({"quantize", whole, "--layout", "zz4_k", "--tile-rows", "many", "-o", tiled}, "is not auto");
}

TEST(Tune, WrongFlagsAndModelsSayWhatToDo) {
  const Folder folder;
  expect_error({"tune", fixture("text_model.gguf")}, "lacuna quantize MODEL --layout zz4_k");
  expect_error({"run", folder.model, "-p", "a", "--profile", folder.dir.file("none.json")},
               "make it with `lacuna tune");
  expect_error({"tune", folder.model, "--levels", "50,25"}, "must ascend");
  expect_error({"tune", folder.model, "--quick"}, "LACUNA_CACHE",
               {.environment = {{"HOME", ""}, {"XDG_CACHE_HOME", ""}, {"LACUNA_CACHE", ""}}});
}

TEST(Tune, TheNumberOfThreadsDoesNotChangeDeterministicResults) {
  const Folder folder;
  folder.calibrate();
  output_of(tune(folder), folder.run);
  const std::string plain = folder.dir.file("f32.gguf");
  std::filesystem::copy_file(fixture("text_model.gguf"), plain);
  for (const std::string& model : {plain, folder.model}) {
    for (const bool sparse : {false, true}) {
      if (sparse && model == plain) continue;
      nlohmann::json first;
      for (const char* threads : {"1", "2", "3", "5"}) {
        std::vector<std::string> arguments = {"run",       model,   "-p",           "the model",
                                              "-n",        "24",    "--ignore-eos", "--deterministic",
                                              "--threads", threads, "--temp",       "0"};
        if (sparse) arguments.insert(arguments.end(), {"--act-sparsity", "50", "--dense-prefix", "0"});
        const auto row = json_of(arguments, folder.run);
        if (first.is_null()) first = row["ids"];
        EXPECT_EQ(row["ids"], first) << model << " with " << threads;
      }
    }
  }
  // A batch of at most 16 tokens multiplies by a plan too.
  std::vector<double> perplexities;
  for (const char* threads : {"1", "2", "3", "5"}) {
    const auto row = json_of({"perplexity", folder.model, "-f", kText, "--ctx", "12", "--chunks", "2",
                              "--deterministic", "--threads", threads});
    EXPECT_EQ(row["deterministic"], true);
    perplexities.push_back(row["ppl"]);
  }
  EXPECT_EQ(perplexities, std::vector<double>(4, perplexities[0]));
  const Finished both = run_lacuna({"run", plain, "-p", "a", "--deterministic", "--profile", "p.json"});
  EXPECT_EQ(both.code, 2) << both.err;
}

}  // namespace
}  // namespace lacuna::test
