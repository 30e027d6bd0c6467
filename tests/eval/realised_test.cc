#include "eval/realised.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"

namespace lacuna::eval {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kTokens = 100, kWidth = 10;

/// Four layers whose every input leaves out `share` of what it reads.
model::SparsityCounts counts_of(const std::vector<double>& shares) {
  model::SparsityCounts out;
  out.tokens = kTokens;
  for (const double share : shares) {
    auto& layer = out.layers.emplace_back();
    for (auto& count : layer) count = {std::llround(share * kTokens * kWidth), kTokens * kWidth};
    out.bytes.push_back({1, 2, 3, 4});
  }
  return out;
}

model::Thresholds half(size_t n_layers) {
  model::Thresholds out;
  out.level = 0.5;
  out.t.assign(n_layers, {1, 1, 1, 1});
  out.realised.assign(n_layers, {0.5f, 0.5f, 0.5f, 0.5f});
  return out;
}

TEST(Realised, WithinTheBounds) {
  const Realised out = check_realised(counts_of({0.5, 0.46, 0.5, 0.51}), half(4), kTokens);
  EXPECT_TRUE(out.within) << out.note;
  EXPECT_EQ(out.note, "");
  EXPECT_NEAR(out.share, 0.4925, 1e-6);
  EXPECT_EQ(out.farthest, 1);
  EXPECT_NEAR(out.layers[1], 0.46, 1e-6);
  EXPECT_EQ(out.layers_expected[1], 0.5);
}

TEST(Realised, BeyondTheBoundsIsSaidInOneLine) {
  const Realised whole = check_realised(counts_of({0.47, 0.47, 0.47, 0.47}), half(4), kTokens);
  EXPECT_FALSE(whole.within);
  EXPECT_THAT(whole.note, AllOf(HasSubstr("47.0% where 50.0%"), HasSubstr("calibrate")));
  EXPECT_EQ(whole.note.find('\n'), std::string::npos);
  const Realised layer = check_realised(counts_of({0.5, 0.5, 0.57, 0.46}), half(4), kTokens);
  EXPECT_FALSE(layer.within);
  EXPECT_THAT(layer.note, AllOf(HasSubstr("1 of 4 layers"), HasSubstr("layer 2 farthest with 57.0% for 50.0%")));
}

TEST(Realised, AnInputThatRunsDenseIsExpectedTo) {
  model::Thresholds thresholds = half(2);
  thresholds.t[1] = {0, 0, 0, 0};
  const Realised out = check_realised(counts_of({0.5, 0}), thresholds, kTokens);
  EXPECT_EQ(out.layers_expected[1], 0);
  EXPECT_EQ(out.expected, 0.25);
}

TEST(Realised, WhatNoTextExplainsIsAnError) {
  EXPECT_THAT(
      [] {
        check_realised(counts_of({0.5, 0.1}), half(2), kTokens);
      },
      ThrowsMessage<Error>(AllOf(HasSubstr("layer 1 leaves out 10.0%"), HasSubstr("calibrate this model"))));
  EXPECT_THAT(
      [] {
        check_realised(counts_of({0.5, 0.5}), half(2), kTokens + 1);
      },
      ThrowsMessage<Error>(HasSubstr("100 tokens left inputs out, expected 101")));
  model::SparsityCounts missing = counts_of({0.5, 0.5, 0.5});
  missing.layers[1][2].inputs -= kWidth;  // a token that one layer did not see
  EXPECT_THAT([&] { check_realised(missing, half(3), kTokens); },
              ThrowsMessage<Error>(HasSubstr("layer 1, ffn_in: 990 inputs")));
}

TEST(Realised, NoTokenBehindThePrefix) {
  model::SparsityCounts none = counts_of({0, 0});
  none.tokens = 0;
  for (auto& layer : none.layers) layer = {};
  EXPECT_THAT(check_realised(none, half(2), 0).note, HasSubstr("dense prefix"));
}

}  // namespace
}  // namespace lacuna::eval
