#include "model/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"

namespace lacuna::model {
namespace {

SamplerOptions plain() {
  SamplerOptions options;
  options.temperature = 1;
  options.top_k = 0;
  options.top_p = 1;
  options.min_p = 0;
  return options;
}

std::vector<double> frequencies(SamplerOptions options, const std::vector<float>& logits, int draws = 20000) {
  Sampler sampler(options, int64_t(logits.size()));
  std::vector<double> out(logits.size());
  for (int i = 0; i < draws; ++i) out[size_t(sampler.sample(logits))] += 1.0 / draws;
  return out;
}

// Probabilities 0.5, 0.25, 0.125, 0.125.
const std::vector<float> kLogits = {std::log(2.0f), std::log(8.0f), std::log(4.0f), std::log(2.0f)};

void expect_frequencies(const std::vector<double>& got, const std::vector<double>& expected) {
  // Five standard deviations of 20,000 draws: 5 * sqrt(0.25 / 20000) = 0.018.
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 0.018) << i;
}

TEST(Sampler, DrawsByProbability) { expect_frequencies(frequencies(plain(), kLogits), {0.125, 0.5, 0.25, 0.125}); }

TEST(Sampler, Temperature) {
  SamplerOptions options = plain();
  options.temperature = 0.5f;  // squares: 1, 16, 4, 1 of 22
  expect_frequencies(frequencies(options, kLogits), {1 / 22.0, 16 / 22.0, 4 / 22.0, 1 / 22.0});
}

TEST(Sampler, TopK) {
  SamplerOptions options = plain();
  options.top_k = 2;
  expect_frequencies(frequencies(options, kLogits), {0, 2 / 3.0, 1 / 3.0, 0});
  options.top_k = 3;  // equal logits: the lower id first
  expect_frequencies(frequencies(options, kLogits), {1 / 7.0, 4 / 7.0, 2 / 7.0, 0});
  options.top_k = 100;
  expect_frequencies(frequencies(options, kLogits), {0.125, 0.5, 0.25, 0.125});
}

TEST(Sampler, ChoosesOfCandidatesWhatItSamples) {
  SamplerOptions options;
  options.temperature = 1.5f;
  options.top_k = 3;
  options.repeat_penalty = 1.2f;
  Sampler whole(options, 5), parts(options, 5);
  EXPECT_EQ(whole.wanted(), 3);
  const std::vector<float> logits = {-1, 3, 2.5f, 3, 0};
  for (const int32_t id : {1, 0, 1})
    for (Sampler* sampler : {&whole, &parts}) sampler->accept(id);
  const std::span<const int32_t> penalized = parts.penalized();
  EXPECT_EQ(std::vector<int32_t>(penalized.begin(), penalized.end()), (std::vector<int32_t>{1, 0}));
  for (int i = 0; i < 100; ++i) {
    std::vector<Candidate> candidates = {{3, 3}, {3 / 1.2f, 1}, {2.5f, 2}};  // 3 / 1.2f is 2.5f: the lower id first
    EXPECT_EQ(parts.choose(candidates), whole.sample(logits));
  }
  options.temperature = 0;
  EXPECT_EQ(Sampler(options, 5).wanted(), 1);
  std::vector<Candidate> none = {{-std::numeric_limits<float>::infinity(), 0}};
  EXPECT_THROW(parts.choose(none), BadLogits);
}

TEST(Sampler, TopPKeepsTheShortestHead) {
  SamplerOptions options = plain();
  options.top_p = 0.7f;
  expect_frequencies(frequencies(options, kLogits), {0, 2 / 3.0, 1 / 3.0, 0});
  options.top_p = 1e-6f;
  expect_frequencies(frequencies(options, kLogits), {0, 1, 0, 0});
}

TEST(Sampler, MinPIsRelativeToTheBest) {
  SamplerOptions options = plain();
  options.min_p = 0.4f;  // keeps 0.25 / 0.5, drops 0.125 / 0.5
  expect_frequencies(frequencies(options, kLogits), {0, 2 / 3.0, 1 / 3.0, 0});
  options.min_p = 1;
  expect_frequencies(frequencies(options, kLogits), {0, 1, 0, 0});
}

TEST(Sampler, GreedyTakesTheLowestIdAmongEquals) {
  SamplerOptions options = plain();
  options.temperature = 0;
  Sampler sampler(options, 4);
  EXPECT_EQ(sampler.sample(std::vector<float>{1, 5, 5, 2}), 1);
  const float low = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(sampler.sample(std::vector<float>{low, low, -3, low}), 2);
}

TEST(Sampler, RepeatPenalty) {
  SamplerOptions options = plain();
  options.temperature = 0;
  options.repeat_penalty = 2;
  options.repeat_window = 2;
  Sampler sampler(options, 3);
  const std::vector<float> logits = {5, 4, -1};
  EXPECT_EQ(sampler.sample(logits), 0);
  sampler.accept(0);
  EXPECT_EQ(sampler.sample(logits), 1);  // 2.5 against 4
  sampler.accept(0);                     // twice in the window: still penalised once
  EXPECT_EQ(sampler.sample(std::vector<float>{5, 2, -1}), 0);
  sampler.accept(1);
  sampler.accept(2);  // 0 left the window
  EXPECT_EQ(sampler.sample(logits), 0);
  Sampler negative(options, 3);
  negative.accept(0);
  EXPECT_EQ(negative.sample(std::vector<float>{-1, -1.5f, -9}), 1);  // -1 becomes -2
}

TEST(Sampler, SameSeedSameDraws) {
  SamplerOptions options;
  options.seed = 7;
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = float((i * 37) % 101) * 0.05f;
  Sampler a(options, 1000), b(options, 1000);
  options.seed = 8;
  Sampler c(options, 1000);
  int different = 0;
  for (int i = 0; i < 100; ++i) {
    const int32_t drawn = a.sample(logits);
    EXPECT_EQ(drawn, b.sample(logits));
    different += drawn != c.sample(logits);
    a.accept(drawn), b.accept(drawn), c.accept(drawn);
  }
  EXPECT_GT(different, 50);
}

TEST(Sampler, BrokenLogitsAreErrors) {
  for (const float temperature : {0.0f, 1.0f}) {
    SamplerOptions options = plain();
    options.temperature = temperature;
    Sampler sampler(options, 3);
    for (const size_t place : {0, 1, 2}) {
      std::vector<float> logits = {1, 2, 3};
      logits[place] = std::nanf("");
      EXPECT_THAT([&] { sampler.sample(logits); }, testing::ThrowsMessage<Error>(testing::HasSubstr("NaN")));
      logits[place] = std::numeric_limits<float>::infinity();
      EXPECT_THROW(sampler.sample(logits), Error);
    }
    EXPECT_THROW(sampler.sample(std::vector<float>(3, -std::numeric_limits<float>::infinity())), Error);
    EXPECT_THROW(sampler.sample(std::vector<float>{}), Error);
  }
}

TEST(Sampler, OptionsOutOfRangeAreNamed) {
  const auto refuses = [](auto set, const char* name) {
    SamplerOptions options;
    set(options);
    EXPECT_THAT([&] { Sampler(options, 10); }, testing::ThrowsMessage<Error>(testing::HasSubstr(name))) << name;
  };
  refuses([](auto& o) { o.temperature = -1; }, "temperature");
  refuses([](auto& o) { o.temperature = std::nanf(""); }, "temperature");
  refuses([](auto& o) { o.top_k = -1; }, "top-k");
  refuses([](auto& o) { o.top_p = 0; }, "top-p");
  refuses([](auto& o) { o.top_p = 1.5f; }, "top-p");
  refuses([](auto& o) { o.min_p = -0.1f; }, "min-p");
  refuses([](auto& o) { o.repeat_penalty = 0; }, "repeat-penalty");
  refuses([](auto& o) { o.repeat_window = -1; }, "repeat-window");
}

}  // namespace
}  // namespace lacuna::model
