// Tiny checkpoints with transformers' logits, from the Hugging Face folder and from the GGUF file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "io/quantize.h"
#include "model/decoder.h"
#include "model/support.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

// Of all logits, where layers round their inputs to 8 bits of a block's largest: about 0.8% a layer, five in a row.
constexpr double kEightBits = 0.05;
constexpr float kTolerance = 1e-4f;  // tests/fixtures/README.md: float64 agrees within 2e-5

struct Truth {
  std::vector<int32_t> input_ids, greedy_ids;
  std::vector<std::vector<float>> logits;  // [T][V]
};

Truth read_truth(const std::string& name, const std::string& folder = "hf/") {
  const auto json = nlohmann::json::parse(test::read_text(test::fixture(folder + name + "/logits.json")));
  return {json["input_ids"], json["greedy_ids"], json["logits"]};
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(test::fixture(folder)))
    names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Logits of all ids, run in pieces of `piece` tokens.
std::vector<std::vector<float>> run(Decoder& decoder, const std::vector<int32_t>& ids, size_t piece) {
  Session session(decoder, int64_t(ids.size()), kernels::KvType::f32);
  std::vector<std::vector<float>> out;
  const int64_t V = decoder.config().n_vocab;
  for (size_t begin = 0; begin < ids.size(); begin += piece) {
    const size_t count = std::min(piece, ids.size() - begin);
    int64_t next = 0;
    decoder.forward(session, std::span(ids).subspan(begin, count), Decoder::Want::all,
                    [&](int64_t first, int64_t rows, const float* logits) {
                      EXPECT_EQ(first, next);
                      next += rows;
                      for (int64_t row = 0; row < rows; ++row)
                        out.emplace_back(logits + row * V, logits + (row + 1) * V);
                    });
    EXPECT_EQ(next, int64_t(count));
  }
  return out;
}

double largest_difference(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  EXPECT_EQ(a.size(), b.size());
  test::Largest worst;
  for (size_t t = 0; t < std::min(a.size(), b.size()); ++t) {
    EXPECT_EQ(a[t].size(), b[t].size());
    for (size_t i = 0; i < std::min(a[t].size(), b[t].size()); ++i) {
      worst.add(std::abs(a[t][i] - b[t][i]));
    }
  }
  return worst.value();
}

/// ||a - b|| / ||b|| over all logits.
double relative_difference(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, whole = 0;
  for (size_t t = 0; t < std::min(a.size(), b.size()); ++t) {
    EXPECT_EQ(a[t].size(), b[t].size());
    for (size_t i = 0; i < std::min(a[t].size(), b[t].size()); ++i) {
      difference += std::pow(double(a[t][i]) - double(b[t][i]), 2);
      whole += std::pow(double(b[t][i]), 2);
    }
  }
  return std::sqrt(difference / whole);
}

std::vector<int32_t> greedy(Decoder& decoder, const std::vector<int32_t>& prompt, size_t count) {
  Session session(decoder, int64_t(prompt.size() + count), kernels::KvType::f32);
  std::vector<int32_t> out;
  std::span<const float> logits = decoder.forward(session, prompt);
  while (out.size() < count) {
    out.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    if (out.size() < count) logits = decoder.forward(session, {&out.back(), 1});
  }
  return out;
}

struct Case {
  std::string name, path;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.path; }
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const std::string& name : names_in("hf")) {
    // A folder with a tokenizer is a trained model with a test of its own.
    if (std::filesystem::exists(test::fixture("hf/" + name + "/logits.json")))
      out.push_back({name, test::fixture("hf/" + name)});
  }
  for (const std::string& name : names_in("gguf_models"))
    if (std::filesystem::exists(test::fixture("hf/" + name + "/logits.json")))
      out.push_back({name, test::fixture("gguf_models/" + name + ".gguf")});
  return out;
}

class Fixture : public testing::TestWithParam<Case> {};

TEST_P(Fixture, GivesTheLogitsOfTransformers) {
  const Truth truth = read_truth(GetParam().name);
  Model model(GetParam().path);
  EXPECT_LE(largest_difference(run(*model.decoder, truth.input_ids, truth.input_ids.size()), truth.logits), kTolerance);
}

TEST_P(Fixture, TokenByTokenEqualsPrefill) {
  const Truth truth = read_truth(GetParam().name);
  Model model(GetParam().path);
  for (const size_t piece : {1, 3, 5})
    EXPECT_LE(largest_difference(run(*model.decoder, truth.input_ids, piece), truth.logits), kTolerance) << piece;
}

TEST_P(Fixture, ContinuesGreedilyAsTransformers) {
  const Truth truth = read_truth(GetParam().name);
  Model model(GetParam().path, 1);
  EXPECT_EQ(greedy(*model.decoder, truth.input_ids, truth.greedy_ids.size()), truth.greedy_ids);
}

INSTANTIATE_TEST_SUITE_P(All, Fixture, testing::ValuesIn(cases()), [](const auto& one) {
  const bool gguf = one.param.path.ends_with(".gguf");
  return one.param.name + (gguf ? "_gguf" : "_hf");
});

/// Models that other programs have quantized or pruned; the logits are those of the dequantized weights.
class Imported : public testing::TestWithParam<std::string> {
 protected:
  std::string folder() const { return test::fixture("quantized/" + GetParam()); }
  Truth truth() const { return read_truth(GetParam(), "quantized/"); }
};

TEST_P(Imported, GivesTheLogitsOfTransformers) {
  const test::TempDir dir;
  ThreadPool pool(2);
  io::quantize(io::Checkpoint::open(folder()), dir.file("f32.gguf"), {.layout = layout::Id::f32, .progress = false},
               pool);
  Model model(dir.file("f32.gguf"));
  const Truth expected = truth();
  EXPECT_LE(largest_difference(run(*model.decoder, expected.input_ids, expected.input_ids.size()), expected.logits),
            kTolerance);
}

TEST_P(Imported, RunsAsItIsStored) {
  const test::TempDir dir;
  ThreadPool pool(2);
  io::quantize(io::Checkpoint::open(folder()), dir.file("x.gguf"), {.keep_source = true, .progress = false}, pool);
  const Truth expected = truth();
  for (const std::string& path : {folder(), dir.file("x.gguf")}) {
    Model model(path);
    EXPECT_LE(relative_difference(run(*model.decoder, expected.input_ids, 3), expected.logits), kEightBits) << path;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Imported, testing::ValuesIn(names_in("quantized")),
                         [](const auto& one) { return one.param; });

TEST(Fixture, AllFamiliesAreThere) {
  std::set<std::string> architectures;
  for (const Case& c : cases()) architectures.insert(io::Checkpoint::open(c.path).architecture());
  EXPECT_THAT(architectures, testing::ElementsAre("llama", "opt", "qwen2", "qwen3"));
  EXPECT_GE(cases().size(), 34u);
}

TEST(Decoder, LastLogitsEqualThoseOfAll) {
  Model model(test::fixture("hf/llama_mha"));
  const Truth truth = read_truth("llama_mha");
  Session session(*model.decoder, 64, kernels::KvType::f32);
  const std::span<const float> last = model.decoder->forward(session, truth.input_ids);
  for (size_t i = 0; i < last.size(); ++i) EXPECT_NEAR(last[i], truth.logits.back()[i], kTolerance);
}

TEST(Decoder, HalfPrecisionCachesStayClose) {
  // f16 keeps 11 bits, q8_0 about 8 of each block's largest: logits of size about 1 move by at most 1e-2 and 1e-1.
  const Truth truth = read_truth("llama_head_dim");
  Model model(test::fixture("hf/llama_head_dim"));
  for (const auto& [type, bound] : {std::pair{kernels::KvType::f16, 1e-2f}, std::pair{kernels::KvType::q8_0, 1e-1f}}) {
    Session session(*model.decoder, 64, type);
    const std::span<const float> last = model.decoder->forward(session, truth.input_ids);
    for (size_t i = 0; i < last.size(); ++i) EXPECT_NEAR(last[i], truth.logits.back()[i], bound);
  }
}

TEST(Decoder, TruncatedSessionForgets) {
  Model model(test::fixture("hf/qwen2"));
  const Truth truth = read_truth("qwen2");
  Session session(*model.decoder, 40, kernels::KvType::f32);
  model.decoder->forward(session, truth.input_ids);
  session.truncate(4);
  const std::span<const float> again = model.decoder->forward(session, std::span(truth.input_ids).subspan(4));
  for (size_t i = 0; i < again.size(); ++i) EXPECT_NEAR(again[i], truth.logits.back()[i], kTolerance);
  EXPECT_THROW(session.truncate(1000), Error);
  EXPECT_THROW(session.truncate(-1), Error);
}

}  // namespace
}  // namespace lacuna::model
