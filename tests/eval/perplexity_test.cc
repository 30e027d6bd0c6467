#include "eval/perplexity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "io/gguf_writer.h"
#include "loaded_model.h"
#include "test_support.h"

namespace lacuna::eval {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct Model : test::LoadedModel {
  using LoadedModel::LoadedModel;
  Tokenizer tokenizer(bool bos) const {
    Vocabulary vocabulary = checkpoint.vocabulary();
    vocabulary.add_bos = bos;
    return Tokenizer(std::move(vocabulary));
  }
};

PerplexityOptions quiet(int64_t ctx, Protocol protocol) {
  PerplexityOptions options;
  options.ctx = ctx;
  options.protocol = protocol;
  options.kv = kernels::KvType::f32;
  options.progress = false;
  return options;
}

TEST(PerplexityFixture, BothProtocolsGiveTransformersFigures) {
  const auto truth = nlohmann::json::parse(test::read_text(test::fixture("text_model/reference.json")));
  const std::string text = test::read_text(test::fixture("text_model/sample.txt"));
  for (const char* path : {"text_model", "text_model.gguf"}) {
    const Model model(test::fixture(path));
    ASSERT_GE(truth["perplexity"].size(), 8u);
    for (const auto& row : truth["perplexity"]) {
      const Protocol protocol = row["protocol"] == "hf" ? Protocol::hf : Protocol::llama_cpp;
      const bool bos = row["bos"];
      const PerplexityResult result =
          perplexity(*model.decoder, model.tokenizer(bos), text, quiet(row["ctx"], protocol));
      EXPECT_EQ(result.windows, row["windows"]) << row;
      EXPECT_EQ(result.tokens, row["tokens"]) << row;
      EXPECT_EQ(name_of(result.bos), !bos                       ? "no"
                                     : protocol == Protocol::hf ? "before the text"
                                                                : "in every window")
          << row;
      EXPECT_NEAR(result.ppl / double(row["ppl"]), 1, 1e-4) << path << ' ' << row;
    }
  }
}

TEST(Perplexity, CountsErrorAndHookAgree) {
  const Model model(test::fixture("text_model"));
  const Tokenizer tokenizer = model.tokenizer(false);
  const std::string text = test::read_text(test::fixture("text_model/sample.txt"));
  const std::vector<int32_t> ids = tokenizer.encode(text);
  for (const Protocol protocol : {Protocol::hf, Protocol::llama_cpp}) {
    PerplexityOptions options = quiet(50, protocol);
    options.chunks = 3;
    const int64_t first = protocol == Protocol::hf ? 0 : 25, scored = 49 - first;
    std::vector<double> losses;
    int64_t announced = 0;
    options.on_start = [&](int64_t rows) {
      EXPECT_TRUE(losses.empty());
      announced = rows;
    };
    options.on_logits = [&](std::span<const float> logits) {
      const auto i = int64_t(losses.size());
      const int32_t next = ids[size_t(i / scored * 50 + first + i % scored + 1)];
      double sum = 0;
      for (const float logit : logits) sum += std::exp(double(logit));
      losses.push_back(std::log(sum) - double(logits[size_t(next)]));
    };
    const PerplexityResult result = perplexity(*model.decoder, tokenizer, text, options);
    ASSERT_EQ(int64_t(losses.size()), result.tokens);
    EXPECT_EQ(result.tokens, 3 * scored);
    EXPECT_EQ(announced, result.tokens);
    double mean = 0, variance = 0;
    for (const double loss : losses) mean += loss / double(losses.size());
    for (const double loss : losses) variance += (loss - mean) * (loss - mean) / double(losses.size());
    EXPECT_NEAR(result.ppl, std::exp(mean), 1e-4 * result.ppl);
    EXPECT_NEAR(result.std_error, std::exp(mean) * std::sqrt(variance / double(losses.size() - 1)), 1e-4 * result.ppl);
  }
}

TEST(Perplexity, WindowsLongerThanABatchAndAHeadChunk) {
  // 200 scored rows need two chunks of the head; the same tokens in one go give the same losses.
  const Model model(test::fixture("text_model"));
  const Tokenizer tokenizer = model.tokenizer(false);
  const std::string text = test::read_text(test::fixture("text_model/sample.txt"));
  PerplexityOptions options = quiet(200, Protocol::hf);
  options.chunks = 1;
  std::vector<std::vector<float>> rows;
  options.on_logits = [&](std::span<const float> logits) { rows.emplace_back(logits.begin(), logits.end()); };
  perplexity(*model.decoder, tokenizer, text, options);
  ASSERT_EQ(rows.size(), 199u);
  const std::vector<int32_t> ids = tokenizer.encode(text);
  model::Session session(*model.decoder, 200, kernels::KvType::f32);
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::span<const float> logits = model.decoder->forward(session, {&ids[i], 1});
    for (size_t k = 0; k < logits.size(); ++k) ASSERT_NEAR(logits[k], rows[i][k], 1e-3) << i;
  }
}

TEST(Perplexity, ShortTextsSayWhatTheyNeed) {
  const Model model(test::fixture("text_model"));
  const Tokenizer tokenizer = model.tokenizer(false);
  for (const auto& [text, tokens] :
       {std::pair<std::string, std::string>{"", "has 0"}, {"a", "has 1"}, {"The default", "has"}}) {
    for (const Protocol protocol : {Protocol::hf, Protocol::llama_cpp}) {
      const auto run = [&model, &tokenizer, protocol, t = text] {
        perplexity(*model.decoder, tokenizer, t, quiet(64, protocol));
      };
      EXPECT_THAT(run, ThrowsMessage<Error>(testing::AllOf(HasSubstr("needs 64 tokens"), HasSubstr(tokens))));
    }
  }
}

TEST(Perplexity, RefusesContextsThatTheModelLacks) {
  const Model model(test::fixture("text_model"));
  const Tokenizer tokenizer = model.tokenizer(false);
  for (const int64_t ctx : {int64_t{0}, int64_t{1}, model.decoder->config().n_ctx + 1})
    EXPECT_THROW(perplexity(*model.decoder, tokenizer, "text", quiet(ctx, Protocol::hf)), Error);
}

TEST(Perplexity, AWindowThatScoresNothingIsRefused) {
  const Model model(test::fixture("text_model"));
  const Tokenizer tokenizer = model.tokenizer(false);
  const std::string text = test::read_text(test::fixture("text_model/sample.txt"));
  PerplexityOptions options = quiet(2, Protocol::llama_cpp);
  options.chunks = 2;
  EXPECT_THAT([&] { perplexity(*model.decoder, tokenizer, text, options); },
              ThrowsMessage<Error>(HasSubstr("3 tokens or more, got 2")));
  options.ctx = 3;
  EXPECT_EQ(perplexity(*model.decoder, tokenizer, text, options).tokens, 2);
  options.ctx = 2;
  options.protocol = Protocol::hf;
  EXPECT_EQ(perplexity(*model.decoder, tokenizer, text, options).tokens, 2);
}

TEST(Perplexity, OneNanLogitFailsTheRun) {
  // A copy of the model whose final norm has one NaN.
  const io::Checkpoint source = io::Checkpoint::open(test::fixture("text_model.gguf"));
  const test::TempDir folder;
  std::vector<io::TensorPlan> plan;
  for (const io::Tensor& tensor : source.tensors())
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
  io::GgufWriter writer(folder.file("nan.gguf"), source.metadata(), plan);
  for (const io::Tensor& tensor : source.tensors()) {
    std::vector<std::byte> bytes(tensor.bytes.begin(), tensor.bytes.end());
    if (tensor.name == "output_norm.weight") {
      ASSERT_EQ(tensor.layout->id, layout::Id::f32);
      const float nan = std::nanf("");
      std::memcpy(bytes.data() + 8, &nan, sizeof(nan));
    }
    writer.write(bytes);
  }
  writer.finish();
  const Model model(folder.file("nan.gguf"));
  const std::string text = test::read_text(test::fixture("text_model/sample.txt"));
  EXPECT_THAT([&] { perplexity(*model.decoder, model.tokenizer(false), text, quiet(64, Protocol::llama_cpp)); },
              ThrowsMessage<Error>(testing::AllOf(HasSubstr("NaN"), HasSubstr("position 32"))));
}

}  // namespace
}  // namespace lacuna::eval
