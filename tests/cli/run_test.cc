// `run`: greedy text against third-party ids, special tokens, the edge of the context, chat.
#include <cmath>
#include <cstring>

#include "cli/chat.h"
#include "core/error.h"
#include "models.h"
#include "process.h"

namespace lacuna::test {
namespace {

std::string joined(const std::vector<int64_t>& ids) {
  std::string out;
  for (const int64_t id : ids) {
    if (!out.empty()) out += ',';
    out += std::to_string(id);
  }
  return out;
}

TEST(Run, GreedyIdsAreThoseOfTransformers) {
  int checkpoints = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fixture("hf"))) {
    const auto expected = nlohmann::json::parse(read_text(entry.path() / "logits.json"));
    const auto greedy = expected["greedy_ids"].get<std::vector<int64_t>>();
    std::vector<std::string> models = {entry.path().string()};
    const std::string converted = fixture("gguf_models/" + entry.path().filename().string() + ".gguf");
    if (std::filesystem::exists(converted)) models.push_back(converted);
    for (const std::string& model : models) {
      const auto ran = json_of({"run", model, "--prompt-ids", joined(expected["input_ids"].get<std::vector<int64_t>>()),
                                "-n", std::to_string(greedy.size()), "--temp", "0", "--ignore-eos", "--kv", "f32"});
      EXPECT_EQ(ran["ids"].get<std::vector<int64_t>>(), greedy) << model;
      ++checkpoints;
    }
  }
  EXPECT_GE(checkpoints, 30);
}

TEST(Run, BeamsFindLikelierTexts) {
  const std::string model = fixture("text_model.gguf");
  const auto beams = [&](const char* count, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"run", model, "-p", "a", "-n", "12", "--beams", count};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const auto greedy = json_of({"run", model, "-p", "a", "-n", "12", "--temp", "0"}), one = json_of(beams("1"));
  EXPECT_EQ(one["ids"], greedy["ids"]);
  EXPECT_EQ(one["text"], greedy["text"]);
  const auto four = json_of(beams("4", {"--temp", "0"}));
  ASSERT_EQ(four["beam_texts"].size(), 4u);
  EXPECT_EQ(four["beam_texts"][0]["ids"], four["ids"]);
  EXPECT_GE(four["beam_texts"][0]["score"], four["beam_texts"][3]["score"]);
  EXPECT_EQ(four["beams"], 4);
  expect_error(beams("2", {"--temp", "0.5"}), "--temp 0");
  expect_error(beams("2", {"--beam-union"}), "--act-sparsity");
  for (const char* flag : {"--top-k", "--top-p", "--min-p", "--repeat-penalty", "--seed"})
    EXPECT_NE(run_lacuna(beams("2", {flag, "1"})).code, 0) << flag;
}

TEST(Run, StreamsTheTextThatJsonReports) {
  const TempDir dir;
  const std::string model = dir.file("tiny.gguf");
  write_tiny_model(model);
  const std::vector<std::string> arguments = {"run", model, "-p", "Hello", "-n", "12", "--temp", "0", "--ignore-eos"};
  const auto ran = json_of(arguments);
  EXPECT_EQ(ran["ids"].size(), 12u);
  EXPECT_EQ(ran["prompt_ids"].size(), 5u);
  const Finished plain = run_lacuna(arguments);
  EXPECT_EQ(plain.out, ran["text"].get<std::string>() + "\n");
  EXPECT_NE(plain.err.find("tokens/s"), std::string::npos);
  EXPECT_EQ(ran["act_sparsity"], 0.0);
}

TEST(Run, TheSeedDecidesTheText) {
  const TempDir dir;
  const std::string model = dir.file("tiny.gguf");
  write_tiny_model(model);
  const auto ids = [&](const char* seed, const char* threads) {
    return json_of({"run", model, "-p", "Hello", "-n", "20", "--temp", "1.5", "--top-k", "0", "--top-p", "1", "--min-p",
                    "0", "--seed", seed, "--ignore-eos", "--threads", threads})["ids"];
  };
  EXPECT_EQ(ids("1", "1"), ids("1", "2"));
  EXPECT_NE(ids("1", "1"), ids("2", "1"));
}

TEST(Run, RefusesWhatItCannotDo) {
  const std::string model = fixture("gguf_models/llama_tied.gguf");
  expect_error({"run", model, "-p", "a", "--act-sparsity", "0.5"}, "thresholds");
  expect_error({"run", model, "-p", "a", "--system", "Be brief."}, "--chat");
  expect_error({"run", model, "-p", "a", "--chat"}, "--chat-template");
  expect_error({"run", model, "-p", "a", "--chat", "--chat-template", "klingon"}, "chatml");
  expect_error({"run", model, "-p", "a<s>b", "--chat", "--chat-template", "alpaca"},
               "the message contains <s>, a control token of this model");
  expect_error({"run", model, "-p", "a", "--system", "<s>", "--chat", "--chat-template", "alpaca"},
               "the system message contains <s>, a control token of this model");
  expect_error({"run", model, "--chat", "--json"}, "-p TEXT");
  expect_error({"run", model, "-p", "a", "--chat-template", "chatml"}, "--chat-template needs --chat");
  expect_error({"run", model, "-f", "/nonexistent/prompt.txt"}, "/nonexistent/prompt.txt");
  expect_error({"run", model}, "no prompt");
  expect_error({"run", model, "--prompt-ids", "1,48"}, "48");
  expect_error({"run", model, "-p", "a", "--ctx", "65"}, "64");
}

// RECIPES 26.
TEST(Run, NeverTwoBosAndNeverAMadeUpOne) {
  const TempDir dir;
  const std::string plain = fixture("gguf_models/llama_tied.gguf"), with_bos = dir.file("bos.gguf"),
                    without_key = dir.file("none.gguf");
  rewrite(plain, with_bos, [](io::Metadata& m) { m.set("tokenizer.ggml.add_bos_token", true); });
  rewrite(plain, without_key, [](io::Metadata& m) {
    m.erase("tokenizer.ggml.add_bos_token");
    m.erase("tokenizer.ggml.bos_token_id");
  });
  const auto prompt = [](const std::string& model, const std::string& text, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"run", model, "-p", text, "-n", "1", "--temp", "0", "--ignore-eos"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return json_of(arguments)["prompt_ids"].get<std::vector<int>>();
  };
  EXPECT_EQ(prompt(with_bos, "ab"), (std::vector<int>{1, 3, 4}));
  EXPECT_EQ(prompt(with_bos, "<s>ab", {"--special"}), (std::vector<int>{1, 3, 4}));
  EXPECT_EQ(prompt(with_bos, "ab", {"--no-bos"}), (std::vector<int>{3, 4}));
  EXPECT_EQ(prompt(with_bos, ""), (std::vector<int>{1}));
  EXPECT_EQ(prompt(with_bos, "a"), (std::vector<int>{1, 3}));
  for (const std::string& model : {plain, without_key}) {
    EXPECT_EQ(prompt(model, "ab"), (std::vector<int>{3, 4}));
    EXPECT_EQ(prompt(model, "a"), (std::vector<int>{3}));
    expect_error({"run", model, "-p", ""}, "empty");
  }
}

TEST(Run, NoEosBeforeTheTextThatIsToCome) {
  const TempDir dir;
  const std::string model = dir.file("eos.gguf");
  rewrite(fixture("gguf_models/llama_tied.gguf"), model, [](io::Metadata& m) {
    m.set("tokenizer.ggml.add_bos_token", true);
    m.set("tokenizer.ggml.add_eos_token", true);
    m.set("tokenizer.ggml.eos_token_id", uint32_t{2});
  });
  EXPECT_EQ(json_of({"tokenize", model, "-p", "ab"})["ids"], (std::vector<int>{1, 3, 4, 2}));
  EXPECT_EQ(json_of({"run", model, "-p", "ab", "-n", "1"})["prompt_ids"], (std::vector<int>{1, 3, 4}));
  const auto chat = json_of({"run", model, "-p", "ab", "-n", "1", "--chat", "--chat-template", "alpaca"})["prompt_ids"];
  EXPECT_EQ(chat.at(0), 1);
  EXPECT_NE(chat.back(), 2);
}

TEST(Run, NanNamesTheFileAndTheLayer) {
  const TempDir dir;
  const std::string model = dir.file("nan.gguf");
  for (const auto& [broken, place] : {std::pair{"blk.1.ffn_down.weight", "output head"},
                                      {"blk.0.ffn_down.weight", "input attn_in of layer 1"},
                                      {"blk.0.attn_v.weight", "input attn_out of layer 0"}}) {
    rewrite(
        fixture("gguf_models/llama_tied.gguf"), model, [](io::Metadata&) {},
        [&](const std::string& name, std::vector<std::byte>& bytes) {
          const float nan = NAN;
          if (name == broken)
            for (size_t at = 0; at < bytes.size(); at += 4) std::memcpy(bytes.data() + at, &nan, 4);
        });
    expect_error({"run", model, "-p", "ab", "-n", "1"}, model + ": the model produced NaN");
    expect_error({"run", model, "-p", "ab", "-n", "1"}, place);
  }
}

// RECIPES 27. The fixture's context is 64.
TEST(Run, TheContextEndsWithAMessage) {
  const std::string model = fixture("gguf_models/llama_tied.gguf");
  const auto prompt = [](int64_t count) { return joined(std::vector<int64_t>(size_t(count), 5)); };
  for (const int64_t count : {1, 63, 64}) {
    const Finished done = run_lacuna(
        {"run", model, "--prompt-ids", prompt(count), "-n", "1000", "--temp", "0", "--ignore-eos", "--json"});
    EXPECT_EQ(done.code, 0) << done.err;
    const auto ran = json_lines(done.out).at(0);
    EXPECT_EQ(int64_t(ran["ids"].size()), 65 - count) << "the last token's successor needs no place";
    EXPECT_EQ(ran["stop"], "context");
    EXPECT_NE(done.err.find("context of 64 tokens is full"), std::string::npos) << done.err;
  }
  for (const int64_t count : {65, 10000})
    expect_error({"run", model, "--prompt-ids", prompt(count), "-n", "4"}, "the prompt has " + std::to_string(count));
  const auto short_context =
      json_of({"run", model, "--prompt-ids", prompt(4), "-n", "100", "--temp", "0", "--ctx", "8", "--ignore-eos"});
  EXPECT_EQ(short_context["ids"].size(), 5u);
}

TEST(Run, TypesOfCacheAgree) {
  const std::string model = fixture("gguf_models/llama_tied.gguf");
  const auto ids = [&](const char* kv) {
    return json_of(
        {"run", model, "--prompt-ids", "1,7,9,11", "-n", "8", "--temp", "0", "--ignore-eos", "--kv", kv})["ids"];
  };
  EXPECT_EQ(ids("f16"), ids("f32"));
  EXPECT_EQ(ids("q8_0").size(), 8u);
}

class ChatTest : public ::testing::Test {
 protected:
  ChatTest() {
    write_tiny_model(dir_.file("tiny.gguf"));
    model_ = std::make_unique<cli::LoadedModel>(cli::load_model(dir_.file("tiny.gguf"), cli::Common{.threads = 1}));
  }
  cli::Sequence sequence() {
    engines_.push_back(std::make_unique<model::CpuEngine>(*model_->decoder, 256, kernels::KvType::f32));
    return {*engines_.back()};
  }
  model::Sampler sampler() { return model::Sampler({.temperature = 0}, model_->decoder->config().n_vocab); }

  TempDir dir_;
  std::unique_ptr<cli::LoadedModel> model_;
  std::vector<std::unique_ptr<model::CpuEngine>> engines_;
};

const auto kQuiet = [](std::string_view) {};

TEST_F(ChatTest, AnswersFromTheCacheAsFromScratch) {
  cli::Sequence kept = sequence();
  model::Sampler kept_sampler = sampler();
  const cli::GenerateOptions options{.max_tokens = 6, .ignore_end = true};
  cli::Chat chat(*model_, kept, kept_sampler, ChatTemplate::from("chatml"), "", options);
  chat.ask("one", kQuiet);
  const cli::Generation second = chat.ask("two", kQuiet);
  EXPECT_LT(second.prefill_tokens, int64_t(chat.prompt_ids().size())) << "the history was computed again";
  EXPECT_EQ(chat.prompt_ids().size() + second.ids.size() - 1, kept.ids.size());

  cli::Sequence fresh = sequence();
  model::Sampler fresh_sampler = sampler();
  const cli::Generation again = cli::generate(*model_, fresh, fresh_sampler, chat.prompt_ids(), options, kQuiet);
  EXPECT_EQ(again.prefill_tokens, int64_t(chat.prompt_ids().size()));
  EXPECT_EQ(again.ids, second.ids);
  EXPECT_EQ(again.text, second.text);
}

TEST_F(ChatTest, AConversationThatNoLongerFitsKeepsItsHistory) {
  cli::Sequence kept = sequence();
  model::Sampler kept_sampler = sampler();
  cli::Chat chat(*model_, kept, kept_sampler, ChatTemplate::from("chatml"), "", {.max_tokens = 2, .ignore_end = true});
  chat.ask("one", kQuiet);
  const size_t before = chat.prompt_ids().size();
  EXPECT_THROW(chat.ask(std::string(300, 'x'), kQuiet), ::lacuna::Error);
  chat.ask("two", kQuiet);
  EXPECT_LT(chat.prompt_ids().size(), before + 100) << "the message that did not fit is still there";
}

TEST_F(ChatTest, TheProgramReadsMessagesFromItsInput) {
  const Finished done = run_lacuna(
      {"run", dir_.file("tiny.gguf"), "--chat", "--chat-template", "chatml", "-n", "4", "--temp", "0", "--ignore-eos"},
      {.input = "one\n/help\n/clear\none\n/wrong\n/exit\nnever read\n"});
  EXPECT_EQ(done.code, 0) << done.err;
  const size_t end = done.out.find('\n');
  ASSERT_NE(end, std::string::npos);
  const std::string answer = done.out.substr(0, end + 1);
  EXPECT_NE(done.out.find("/clear  forget"), std::string::npos);
  EXPECT_TRUE(done.out.ends_with("\n" + answer)) << "after /clear the same message has the same answer: " << done.out;
  EXPECT_NE(done.err.find("unknown command /wrong"), std::string::npos) << done.err;
}

TEST_F(ChatTest, ALastLineThatWasToGoOnIsAnswered) {
  const auto answer = [&](const std::string& input) {
    return output_of({"run", dir_.file("tiny.gguf"), "--chat", "--chat-template", "chatml", "-n", "4", "--temp", "0",
                      "--ignore-eos"},
                     {.input = input});
  };
  EXPECT_NE(answer("one\\\ntwo\n"), "");
  EXPECT_EQ(answer("one\\\ntwo\\"), answer("one\\\ntwo\n"));
  EXPECT_EQ(answer("one\\\n"), answer("one\n"));
  EXPECT_EQ(answer("\\\n"), "");
}

TEST_F(ChatTest, MarkersThatTheVocabularyLacksAreNamed) {
  const auto said = [&](const char* style) {
    return run_lacuna({"run", dir_.file("tiny.gguf"), "-p", "a", "--chat", "--chat-template", style, "-n", "1"}).err;
  };
  EXPECT_NE(said("chatml").find("no token for <|im_end|>, <|im_start|>"), std::string::npos) << said("chatml");
  for (const char* style : {"alpaca", "zephyr"})
    EXPECT_EQ(said(style).find("no token for"), std::string::npos) << said(style);
}

}  // namespace
}  // namespace lacuna::test
