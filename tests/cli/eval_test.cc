// `eval`: the figures of lm-evaluation-harness from files to JSON, its flags and errors.
#include <cmath>
#include <fstream>

#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

const std::string kModel = fixture("text_model.gguf");

std::string data(const std::string& name) { return fixture("zero_shot/" + name); }

std::vector<std::string> command(const std::string& task, const std::string& file,
                                 const std::vector<std::string>& more = {}) {
  std::vector<std::string> out = {"eval", kModel, "--task", task, "--data", file};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

TEST(Eval, AllTasksInOneRunGiveTheFiguresOfTheHarness) {
  const auto expected = nlohmann::json::parse(read_text(data("expected.json")));
  const TempDir dir;
  std::vector<std::string> arguments = {"eval", kModel, "--kv", "f32", "--json", "--answers-out", dir.file("answers")};
  arguments.insert(arguments.end(), {"--labels", data("piqa-labels.lst")});
  std::vector<nlohmann::json> runs;
  for (const auto& run : expected["runs"]) {
    if (run["max_length"] != 64) continue;
    runs.push_back(run);
    arguments.insert(arguments.end(), {"--task", run["task"], "--data", data(run["file"])});
  }
  arguments.insert(arguments.end(), {"--ctx", "64"});
  const auto rows = json_lines(output_of(arguments));
  ASSERT_EQ(rows.size(), runs.size());
  const auto answers = json_lines(read_text(dir.file("answers")));
  size_t answer = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto &row = rows[i], &run = runs[i];
    for (const char* key : {"task", "n", "truncated"}) EXPECT_EQ(row[key], run[key]) << row;
    for (const char* key : {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}) {
      ASSERT_EQ(row.contains(key), run.contains(key)) << row;
      if (run.contains(key)) {
        EXPECT_NEAR(double(row[key]), double(run[key]), 1e-12) << row;
      }
    }
    for (const char* key : {"ppl", "ppl_stderr"}) {
      ASSERT_EQ(row.contains(key), run.contains(key)) << row;
      if (run.contains(key)) {
        EXPECT_NEAR(double(row[key]) / double(run[key]), 1, 1e-3) << row;
      }
    }
    EXPECT_EQ(row["ctx"], 64);
    EXPECT_EQ(row["bos"], true);
    EXPECT_EQ(row["data_sha256"].get<std::string>().size(), 64u);
    for (const auto& question : run["questions"]) {
      ASSERT_LT(answer, answers.size());
      const auto& own = answers[answer++];
      EXPECT_EQ(own["task"], run["task"]);
      EXPECT_EQ(own["tokens"], question["tokens"]);
      EXPECT_EQ(own["greedy"], question["greedy"]);
      for (size_t c = 0; c < question["loglikelihoods"].size(); ++c)
        EXPECT_NEAR(double(own["loglikelihoods"][c]), double(question["loglikelihoods"][c]), 2e-3);
    }
  }
  EXPECT_EQ(answer, answers.size());
}

TEST(Eval, TheTableSaysWhatAPersonNeeds) {
  const Finished done = run_lacuna(command("lambada", data("lambada.jsonl"), {"--ctx", "64"}));
  EXPECT_EQ(done.code, 0) << done.err;
  for (const char* words :
       {"task", "acc_norm", "perplexity", "lambada", "0.1667 +- 0.1667", "cut at the left to 64 tokens: 2"})
    EXPECT_NE(done.out.find(words), std::string::npos) << words << "\n" << done.out;
  for (const char* words : {"questions/s", "data sha256 "})
    EXPECT_NE(done.err.find(words), std::string::npos) << done.err;
  EXPECT_EQ(done.err.find('\r'), std::string::npos) << "a progress bar in a pipe";
  EXPECT_EQ(done.out.find(" \n"), std::string::npos) << done.out;
}

TEST(Eval, LimitTakesTheFirstQuestions) {
  const auto two = json_of(command("arc-easy", data("arc.jsonl"), {"--limit", "2"}));
  EXPECT_EQ(two["n"], 2);
  EXPECT_EQ(json_of(command("arc-easy", data("arc.jsonl"), {"--limit", "99"}))["n"], 4);
  const auto one = json_of(command("arc-challenge", data("arc.jsonl"), {"--limit", "1"}));
  EXPECT_TRUE(one["acc_stderr"].is_null()) << "no standard error of one question: " << one;
  EXPECT_EQ(json_of(command("lambada", "-"), {.input = read_text(data("lambada.jsonl"))})["n"], 6);
}

TEST(Eval, ThresholdsOfActivationSparsityAreUsed) {
  const TempDir dir;
  const std::string thresholds = dir.file("t.gguf");
  output_of({"calibrate", kModel, "--text", fixture("text_model/sample.txt"), "-o", thresholds, "--tokens", "512"});
  const std::vector<std::string> sparse = {"--act-sparsity", "50", "--thresholds", thresholds};
  const auto row = json_of(command("hellaswag", data("hellaswag.jsonl"), sparse));
  EXPECT_NE(row["act_mode"], "dense");
  EXPECT_GT(double(row["act_sparsity"]), 0.2);
  EXPECT_TRUE(row.contains("act_sparsity_layers"));
  const auto dense = json_of(command("hellaswag", data("hellaswag.jsonl")));
  EXPECT_EQ(dense["act_mode"], "dense");
  EXPECT_EQ(dense["act_sparsity"], 0);
}

TEST(Eval, HelpNamesEveryFlag) {
  const std::string help = output_of({"eval", "--help"});
  for (const char* flag : {"--task", "--data", "--labels", "--limit", "--ctx", "--kv", "--act-sparsity",
                           "--answers-out", "--device", "--threads", "--json"})
    EXPECT_NE(help.find(flag), std::string::npos) << flag;
}

TEST(Eval, ErrorsAreOneSentence) {
  const TempDir dir;
  const auto file = [&](const std::string& name, const std::string& text) {
    std::ofstream(dir.file(name)) << text;
    return dir.file(name);
  };
  expect_usage_error(command("boolq", data("arc.jsonl")), "--task");
  expect_usage_error({"eval", kModel, "--task", "piqa"}, "--data");
  expect_error(command("piqa", data("piqa.jsonl")), "--labels");
  expect_error(command("piqa", data("winogrande.jsonl")), "give --task winogrande");
  expect_error(command("winogrande", data("winogrande.jsonl"), {"--labels", data("piqa-labels.lst")}),
               "--labels is of --task piqa");
  expect_error(command("arc-easy", data("arc.jsonl"), {"--task", "piqa"}), "each --task needs a --data");
  expect_error(command("hellaswag", file("h.bz2", "BZh9")), "bunzip2 -k");
  expect_error(command("lambada", file("empty", "")), "is empty");
  expect_error(command("lambada", file("cut", "{\"text\": \"a b")), "cut: line 1: bad JSON");
  expect_error(command("lambada", dir.file("absent")), "absent: cannot be opened");
  expect_error(command("lambada", data("lambada.jsonl"), {"--ctx", "257"}), "this model's context has 256 tokens");
  expect_error(command("lambada", data("lambada.jsonl"), {"--ctx", "1"}), "does not fit a context of 1");
  expect_error(command("lambada", data("lambada.jsonl"), {"--answers-out", ""}), "--answers-out needs the name");
  expect_error(command("lambada", data("lambada.jsonl"), {"--device", "cuda", "--kv", "f32"}), "--kv");
  expect_error(command("lambada", data("lambada.jsonl"), {"--dense-prefix", "3"}),
               "--dense-prefix needs --act-sparsity");
}

TEST(Docs22m, EvalRunsItsFirstQuestions) {
  LACUNA_NEED_SHARED("models/docs22m");
  LACUNA_NEED_SHARED("zeroshot/piqa-dev.jsonl");
  const auto folder = shared_data() / "zeroshot";
  const auto row = json_of({"eval", (shared_data() / "models/docs22m").string(), "--task", "piqa", "--data",
                            (folder / "piqa-dev.jsonl").string(), "--labels", (folder / "piqa-dev-labels.lst").string(),
                            "--limit", "10"});
  EXPECT_EQ(row["n"], 10);
  EXPECT_EQ(row["bos"], false);
  EXPECT_EQ(row["truncated"], 0);
  EXPECT_EQ(row["data_sha256"], "a73f46cb5d72b2cc399522a79f27728a429d9b89d9a236243fcfda8c02588d54");
  // lm-evaluation-harness 0.4.13 gives these for the same rows.
  EXPECT_NEAR(double(row["acc"]), 0.7, 1e-12);
  EXPECT_NEAR(double(row["acc_norm"]), 0.8, 1e-12);
}

}  // namespace
}  // namespace lacuna::test
