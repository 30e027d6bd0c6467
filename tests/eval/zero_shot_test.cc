// Zero-shot tasks against what lm-evaluation-harness makes of the same files (tests/fixtures/README.md, zero_shot).
#include "eval/zero_shot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"
#include "eval/python_text.h"
#include "loaded_model.h"
#include "test_support.h"

namespace lacuna::eval {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct Model : test::LoadedModel {
  Tokenizer tokenizer;
  explicit Model(const std::string& path) : LoadedModel(path), tokenizer(checkpoint.vocabulary()) {}
  model::CpuEngine engine(int64_t capacity) const { return {*decoder, capacity, kernels::KvType::f32}; }
};

// Name its result: a loop over a part of a temporary reads freed memory (C++20 keeps the part alone).
nlohmann::json expected() { return nlohmann::json::parse(test::read_text(test::fixture("zero_shot/expected.json"))); }

std::vector<Question> fixture_questions(const nlohmann::json& run) {
  const std::string file = test::fixture("zero_shot/" + run["file"].get<std::string>()), text = test::read_text(file);
  const std::string labels = run.contains("labels") ? test::fixture("zero_shot/piqa-labels.lst") : "";
  const std::string label_text = labels.empty() ? "" : test::read_text(labels);
  const Source source{labels, label_text};
  return read_questions(task_named(run["task"].get<std::string>()), {file, text}, labels.empty() ? nullptr : &source);
}

TEST(ZeroShot, PromptsAreThoseOfTheHarness) {
  const nlohmann::json harness = expected();
  for (const auto& run : harness["runs"]) {
    const std::vector<Question> questions = fixture_questions(run);
    ASSERT_EQ(questions.size(), run["questions"].size());
    for (size_t q = 0; q < questions.size(); ++q) {
      const auto& pairs = run["questions"][q]["pairs"];
      ASSERT_EQ(questions[q].choices.size(), pairs.size()) << run["task"] << q;
      for (size_t c = 0; c < pairs.size(); ++c) {
        EXPECT_EQ(questions[q].choices[c].context, pairs[c][0].get<std::string>()) << run["task"] << q;
        EXPECT_EQ(questions[q].choices[c].continuation, pairs[c][1].get<std::string>()) << run["task"] << q;
      }
    }
  }
}

TEST(ZeroShot, LikelihoodsAndFiguresAreThoseOfTheHarness) {
  for (const char* path : {"text_model", "text_model.gguf"}) {
    const Model model(test::fixture(path));
    ASSERT_TRUE(model.tokenizer.adds_bos());
    const nlohmann::json harness = expected();
    for (const auto& run : harness["runs"]) {
      const Task task = task_named(run["task"].get<std::string>());
      const std::vector<Question> questions = fixture_questions(run);
      const int64_t ctx = run["max_length"];
      const TaskTokens tokens = tokenize(questions, model.tokenizer, ctx, "f");
      EXPECT_EQ(tokens.truncated, run["truncated"]) << run["task"] << ctx;
      EXPECT_LE(tokens.longest, ctx);
      model::CpuEngine engine = model.engine(tokens.longest);
      size_t q = 0;
      ZeroShotOptions options;
      options.progress = false;
      options.on_question = [&](const Question&, const QuestionTokens& own, std::span<const Likelihood> likelihoods) {
        const auto& truth = run["questions"][q++];
        ASSERT_EQ(likelihoods.size(), truth["loglikelihoods"].size());
        for (size_t c = 0; c < likelihoods.size(); ++c) {
          const double sum = truth["loglikelihoods"][c];
          EXPECT_EQ(int64_t(own.choices[c].ids.size()) - own.choices[c].first, truth["tokens"][c]) << run["task"] << q;
          // The harness adds up float32 log-probabilities; tests/fixtures/README.md: logits agree within 1e-4.
          EXPECT_NEAR(likelihoods[c].sum, sum, 1e-5 * std::abs(sum) + 1e-4) << run["task"] << q << ' ' << c;
          EXPECT_EQ(likelihoods[c].greedy, truth["greedy"][c].get<bool>()) << run["task"] << q << ' ' << c;
        }
      };
      const TaskResult result = evaluate(engine, model.decoder->pool(), task, questions, tokens, "f", options);
      EXPECT_EQ(result.n, run["n"]);
      EXPECT_NEAR(result.acc.value, double(run["acc"]), 1e-12) << run["task"];
      EXPECT_NEAR(result.acc.error, double(run["acc_stderr"]), 1e-12) << run["task"];
      EXPECT_EQ(has_acc_norm(task), run.contains("acc_norm"));
      if (has_acc_norm(task)) {
        EXPECT_NEAR(result.acc_norm.value, double(run["acc_norm"]), 1e-12) << run["task"];
        EXPECT_NEAR(result.acc_norm.error, double(run["acc_norm_stderr"]), 1e-12) << run["task"];
      }
      if (task == Task::lambada) {
        EXPECT_NEAR(result.ppl.value / double(run["ppl"]), 1, 1e-4);
        EXPECT_NEAR(result.ppl.error / double(run["ppl_stderr"]), 1, 1e-3);
      }
    }
  }
}

TEST(ZeroShot, TextOfLlamaCppGivesTheSameQuestionsAsJson) {
  const std::string text = test::read_text(test::fixture("zero_shot/hellaswag.txt"));
  const std::string json = test::read_text(test::fixture("zero_shot/hellaswag.jsonl"));
  const std::vector<Question> some = read_questions(Task::hellaswag, {"t", text}),
                              all = read_questions(Task::hellaswag, {"j", json});
  ASSERT_EQ(some.size(), 3u);
  for (size_t q = 0; q < some.size(); ++q) {
    EXPECT_EQ(some[q].line, int64_t(6 * q + 1));
    EXPECT_EQ(all[q].line, int64_t(q + 1));
    EXPECT_EQ(some[q].gold, all[q].gold);
    ASSERT_EQ(some[q].choices.size(), 4u);
    for (size_t c = 0; c < 4; ++c) {
      EXPECT_EQ(some[q].choices[c].context, all[q].choices[c].context);
      EXPECT_EQ(some[q].choices[c].continuation, all[q].choices[c].continuation);
      EXPECT_EQ(some[q].choices[c].characters, all[q].choices[c].characters);
    }
  }
}

TEST(ZeroShot, LikelihoodsAreThoseOfWholeSequences) {
  // Without a shared cache: each choice from an empty session, token by token.
  const Model model(test::fixture("text_model"));
  const nlohmann::json harness = expected();
  for (const auto& run : harness["runs"]) {
    const std::vector<Question> questions = fixture_questions(run);
    const TaskTokens tokens = tokenize(questions, model.tokenizer, run["max_length"], "f");
    model::CpuEngine engine = model.engine(256);
    int64_t shared = 0, counted = 0;
    ZeroShotOptions options;
    options.progress = false;
    options.on_question = [&](const Question&, const QuestionTokens& own, std::span<const Likelihood> likelihoods) {
      shared += own.shared;
      counted += own.shared;
      for (size_t c = 0; c < likelihoods.size(); ++c) {
        const ChoiceTokens& choice = own.choices[c];
        counted += int64_t(choice.ids.size()) - 1 - own.shared;
        model::Session session(*model.decoder, 256, kernels::KvType::f32);
        double sum = 0;
        for (int64_t i = 0; i + 1 < int64_t(choice.ids.size()); ++i) {
          const std::span<const float> logits = model.decoder->forward(session, {&choice.ids[size_t(i)], 1});
          if (i + 1 < choice.first) continue;
          double all = 0;
          for (const float logit : logits) all += std::exp(double(logit));
          sum += double(logits[size_t(choice.ids[size_t(i + 1)])]) - std::log(all);
        }
        EXPECT_NEAR(likelihoods[c].sum, sum, 1e-3) << run["task"];
      }
    };
    evaluate(engine, model.decoder->pool(), task_named(run["task"].get<std::string>()), questions, tokens, "f",
             options);
    EXPECT_GT(shared, 0) << run["task"];
    EXPECT_EQ(counted, tokens.run);
    EXPECT_EQ(tokens_behind(0, tokens), tokens.run);
    EXPECT_EQ(tokens_behind(1000, tokens), 0);
    EXPECT_LT(tokens_behind(4, tokens), tokens.run);
  }
}

TEST(ZeroShot, TiesGoToTheFirst) {
  const std::vector<Choice> choices = {{"", "", 2}, {"", "", 4}, {"", "", 8}};
  const auto best = [&](std::vector<double> sums, bool per_character) {
    std::vector<Likelihood> likelihoods;
    for (const double sum : sums) likelihoods.push_back({sum, false});
    return best_of(likelihoods, choices, per_character);
  };
  EXPECT_EQ(best({-3, -3, -3}, false), 0);
  EXPECT_EQ(best({-4, -3, -3}, false), 1);
  EXPECT_EQ(best({-4, -3, -2}, false), 2);
  EXPECT_EQ(best({-4, -8, -16}, true), 0);
  EXPECT_EQ(best({-5, -8, -16}, true), 1);
  EXPECT_EQ(best({-2, -3, -5}, true), 2);
}

TEST(ZeroShot, StandardErrorsAreThoseOfTheSample) {
  // sqrt(p (1 - p) / (n - 1)) for zeros and ones.
  const Mean seven = mean_of(std::vector<double>{1, 0, 1, 1, 0, 0, 1});
  EXPECT_NEAR(seven.value, 4.0 / 7, 1e-15);
  EXPECT_NEAR(seven.error, std::sqrt(4.0 / 7 * 3 / 7 / 6), 1e-15);
  const Mean three = mean_of(std::vector<double>{-1, -2, -6});  // deviations 2, 1, 3: 14 / 2 / 3
  EXPECT_NEAR(three.value, -3, 1e-15);
  EXPECT_NEAR(three.error, std::sqrt(14.0 / 2 / 3), 1e-15);
  const Mean one = mean_of(std::vector<double>{1});
  EXPECT_EQ(one.value, 1);
  EXPECT_TRUE(std::isnan(one.error));
  EXPECT_EQ(mean_of(std::vector<double>{1, 1}).error, 0);
}

TEST(ZeroShot, LongQuestionsKeepTheirEnd) {
  const Model model(test::fixture("text_model"));
  std::string text = "{\"text\": \"";
  for (int i = 0; i < 300; ++i) text += "header " + std::to_string(i) + " ";
  text += "loader\"}\n{\"text\": \"the loader\"}\n";
  const std::vector<Question> questions = read_questions(Task::lambada, {"f", text});
  const TaskTokens cut = tokenize(questions, model.tokenizer, 20, "f"),
                   whole = tokenize(questions, model.tokenizer, 1 << 20, "f");
  EXPECT_EQ(cut.truncated, 1);
  EXPECT_EQ(whole.truncated, 0);
  EXPECT_EQ(cut.longest, 20);
  const ChoiceTokens &kept = cut.questions[0].choices[0], &all = whole.questions[0].choices[0];
  ASSERT_EQ(kept.ids.size(), 21u);  // the last one is not run
  EXPECT_TRUE(std::equal(kept.ids.begin(), kept.ids.end(), all.ids.end() - 21));
  EXPECT_EQ(int64_t(kept.ids.size()) - kept.first, int64_t(all.ids.size()) - all.first);
  EXPECT_EQ(all.ids[0], model.tokenizer.bos());
  EXPECT_NE(kept.ids[0], model.tokenizer.bos());
  // Exactly as long as the context and one more: nothing goes.
  EXPECT_EQ(tokenize(questions, model.tokenizer, int64_t(all.ids.size()) - 1, "f").truncated, 0);
  EXPECT_EQ(tokenize(questions, model.tokenizer, int64_t(all.ids.size()) - 2, "f").truncated, 1);
  EXPECT_THAT([&] { tokenize(questions, model.tokenizer, 1, "f"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("f: line 1"), HasSubstr("does not fit a context of 1"))));
}

TEST(ZeroShot, ContextsWithoutTokens) {
  const Model model(test::fixture("text_model"));
  Vocabulary without = model.checkpoint.vocabulary();
  without.add_bos = false;
  const Tokenizer tokenizer(without);
  const auto tokens_of = [&](const Tokenizer& t, const std::string& context, const std::string& continuation) {
    const std::vector<Question> one = {{.line = 7, .choices = {{context, continuation, 1}}, .gold = 0}};
    return tokenize(one, t, 256, "f").questions[0].choices[0];
  };
  const ChoiceTokens bare = tokens_of(tokenizer, "", " loader");
  EXPECT_EQ(bare.first, 1);
  EXPECT_EQ(bare.ids[0], tokenizer.bos());
  EXPECT_EQ(tokens_of(model.tokenizer, "", " loader").ids, bare.ids);  // one BOS
  // White space at the end of the context goes to the continuation.
  const ChoiceTokens moved = tokens_of(tokenizer, "the  \n", "loader"),
                     there = tokens_of(tokenizer, "the", "  \nloader");
  EXPECT_EQ(moved.ids, there.ids);
  EXPECT_EQ(moved.first, there.first);
  EXPECT_THAT([&] { tokens_of(tokenizer, " \n", "x"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("f: line 7"), HasSubstr("white space"))));
  EXPECT_THAT([&] { tokens_of(tokenizer, "the", ""); },
              ThrowsMessage<Error>(AllOf(HasSubstr("f: line 7"), HasSubstr("no token of its own"))));
  without.bos_id.reset();
  without.eos_id.reset();
  const Tokenizer neither(without);
  EXPECT_THAT([&] { tokens_of(neither, "", "x"); }, ThrowsMessage<Error>(HasSubstr("neither BOS nor EOS")));
}

TEST(Docs22m, ZeroShotLikelihoodsAreThoseOfTheHarness) {
  LACUNA_NEED_SHARED("models/docs22m");
  LACUNA_NEED_SHARED("zeroshot/ARC-Easy-Test.jsonl");
  // lm-evaluation-harness 0.4.13 with transformers in float32, the first three questions of three files.
  struct Truth {
    Task task;
    const char* file;
    std::vector<std::vector<double>> sums;
  };
  const std::vector<Truth> truths = {
      {Task::arc_easy,
       "ARC-Easy-Test.jsonl",
       {{-66.0620193, -58.6249695, -63.8822479, -52.8292656},
        {-35.1821709, -22.6667709, -27.3254662, -23.728756},
        {-14.1576242, -18.1607361, -19.9051704, -27.0657806}}},
      {Task::winogrande,
       "winogrande-dev.jsonl",
       {{-37.2344513, -39.7474213}, {-34.0296555, -36.9286423}, {-21.1845589, -20.2318611}}},
      {Task::lambada, "lambada-openai-test.jsonl", {{-11.4497366}, {-10.3442173}, {-2.82315183}}}};
  const Model model((test::shared_data() / "models/docs22m").string());
  for (const Truth& truth : truths) {
    const std::string file = (test::shared_data() / "zeroshot" / truth.file).string(), text = test::read_text(file);
    std::vector<Question> questions = read_questions(truth.task, {file, text});
    questions.resize(truth.sums.size());
    const TaskTokens tokens = tokenize(questions, model.tokenizer, model.decoder->config().n_ctx, file);
    model::CpuEngine engine = model.engine(tokens.longest);
    size_t q = 0;
    ZeroShotOptions options;
    options.progress = false;
    options.on_question = [&](const Question&, const QuestionTokens&, std::span<const Likelihood> likelihoods) {
      for (size_t c = 0; c < likelihoods.size(); ++c)
        EXPECT_NEAR(likelihoods[c].sum, truth.sums[q][c], 1e-5 * std::abs(truth.sums[q][c])) << truth.file << q << c;
      ++q;
    };
    evaluate(engine, model.decoder->pool(), truth.task, questions, tokens, file, options);
    EXPECT_EQ(q, truth.sums.size());
  }
}

}  // namespace
}  // namespace lacuna::eval
