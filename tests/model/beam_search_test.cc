// Beam search against every text there is, against greedy decoding, and its caches against fresh ones.
#include "model/beam_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "io/gguf_writer.h"
#include "model/cpu_beams.h"
#include "model/support.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using Ids = std::vector<int32_t>;

constexpr auto kF32 = kernels::KvType::f32;

/// text_model.gguf with the first `n_vocab` tokens only, so that all texts can be tried.
void cut_vocabulary(const std::string& to, int64_t n_vocab) {
  const io::Checkpoint source = io::Checkpoint::open(test::fixture("text_model.gguf"));
  io::Metadata metadata = source.metadata();
  std::vector<std::string> tokenizer;
  for (const auto& [key, value] : metadata.entries())
    if (key.starts_with("tokenizer.")) tokenizer.push_back(key);
  for (const std::string& key : tokenizer) metadata.erase(key);
  metadata.set("llama.vocab_size", uint32_t(n_vocab));
  const auto cut = [](const io::Tensor& tensor) {
    return tensor.name == "token_embd.weight" || tensor.name == "output.weight";
  };
  std::vector<io::TensorPlan> plan;
  for (const io::Tensor& tensor : source.tensors()) {
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
    if (cut(tensor)) plan.back().dims[0] = n_vocab;
  }
  io::GgufWriter writer(to, metadata, plan);
  for (const io::Tensor& tensor : source.tensors())
    writer.write(cut(tensor) ? tensor.bytes.first(tensor.bytes.size() / size_t(tensor.dims[0]) * size_t(n_vocab))
                             : tensor.bytes);
  writer.finish();
}

/// log p of every next token, from a fresh cache.
std::vector<double> log_probabilities(Decoder& decoder, const Ids& ids) {
  Session session(decoder, 64, kF32);
  const std::span<const float> logits = decoder.forward(session, ids);
  const double lse = kernels::log_sum_exp(logits.data(), int64_t(logits.size()));
  std::vector<double> out;
  for (const float logit : logits) out.push_back(double(logit) - lse);
  return out;
}

std::vector<Hypothesis> search(Decoder& decoder, const Ids& prompt, int64_t count, BeamOptions options) {
  CpuBeams engine(decoder, count, 64, kF32);
  BeamSearch beams(engine, std::move(options));
  beams.start(prompt);
  while (beams.step()) {
  }
  return beams.texts();
}

class TinyVocabulary : public testing::Test {
 protected:
  static constexpr int32_t kVocab = 8, kEnd = 5;
  TinyVocabulary() : model_((cut_vocabulary(dir_.file("v.gguf"), kVocab), dir_.file("v.gguf"))) {}

  /// All texts of three tokens, and the shorter ones that the end token ends.
  std::vector<Hypothesis> all_texts() {
    std::vector<Hypothesis> out, open = {{}};
    for (int step = 0; step < 3; ++step) {
      std::vector<Hypothesis> longer;
      for (const Hypothesis& text : open) {
        Ids ids = kPrompt;
        ids.insert(ids.end(), text.ids.begin(), text.ids.end());
        const std::vector<double> next = log_probabilities(*model_.decoder, ids);
        for (int32_t id = 0; id < kVocab; ++id) {
          Hypothesis more = text;
          more.log_probability += next[size_t(id)];
          more.ended = id == kEnd;
          if (!more.ended) more.ids.push_back(id);
          (more.ended ? out : longer).push_back(more);
        }
      }
      open = longer;
    }
    out.insert(out.end(), open.begin(), open.end());
    std::sort(out.begin(), out.end(), [](const Hypothesis& a, const Hypothesis& b) { return a.score() > b.score(); });
    return out;
  }

  const Ids kPrompt = {1, 4, 2};
  test::TempDir dir_;
  Model model_;
};

TEST_F(TinyVocabulary, EnoughBeamsFindTheBestOfAllTexts) {
  const std::vector<Hypothesis> all = all_texts();
  ASSERT_EQ(all.size(), 1u + 7 + 49 + 343);
  // 49 beams hold every open text of two tokens.
  const auto found = search(*model_.decoder, kPrompt, 49, {3, [](int32_t id) { return id == kEnd; }});
  ASSERT_EQ(found.size(), 49u);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(found[i].ids, all[i].ids) << i;
    EXPECT_EQ(found[i].ended, all[i].ended) << i;
    EXPECT_NEAR(found[i].log_probability, all[i].log_probability, 1e-4) << i;
  }
}

// The definition in beam_search.h, over the table of all texts.
TEST_F(TinyVocabulary, FewBeamsKeepTheLikeliestOfEachStep) {
  const std::vector<Hypothesis> all = all_texts();
  std::map<Ids, double> open;      // log-probability of every text that goes on
  std::map<Ids, double> finished;  // and of every one that ends here
  open[{}] = 0;
  for (const Hypothesis& text : all) (text.ended ? finished : open)[text.ids] = text.log_probability;
  for (int32_t a = 0; a < kVocab; ++a) {
    if (a == kEnd) continue;
    Ids ids = kPrompt;
    const double first = log_probabilities(*model_.decoder, ids)[size_t(a)];
    open[{a}] = first;
    ids.push_back(a);
    const auto next = log_probabilities(*model_.decoder, ids);
    for (int32_t b = 0; b < kVocab; ++b)
      if (b != kEnd) open[{a, b}] = first + next[size_t(b)];
  }
  for (const size_t B : {1, 2, 3, 4}) {
    std::vector<Ids> live = {{}};
    std::vector<Hypothesis> expected;
    bool settled = false;
    for (size_t step = 1; step <= 3 && !settled; ++step) {
      std::vector<std::pair<double, Ids>> ranked;
      for (const Ids& text : live) {
        for (int32_t id = 0; id < kVocab; ++id) {
          Ids longer = text;
          longer.push_back(id);
          ranked.push_back({id == kEnd ? finished.at(text) : open.at(longer), longer});
        }
      }
      std::sort(ranked.rbegin(), ranked.rend());
      live.clear();
      for (size_t rank = 0; rank < ranked.size() && live.size() < B; ++rank) {
        Ids ids = ranked[rank].second;
        if (ids.back() != kEnd) {
          live.push_back(ids);
        } else if (rank < B) {
          ids.pop_back();
          expected.push_back({ids, ranked[rank].first, true});
        }
      }
      std::sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) { return a.score() > b.score(); });
      if (expected.size() > B) expected.resize(B);
      settled = expected.size() == B && expected.back().score() >= open.at(live[0]) / double(step);
    }
    if (!settled)
      for (const Ids& ids : live) expected.push_back({ids, open.at(ids), false});
    std::sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) { return a.score() > b.score(); });
    const auto found = search(*model_.decoder, kPrompt, int64_t(B), {3, [](int32_t id) { return id == kEnd; }});
    ASSERT_EQ(found.size(), std::min(B, expected.size())) << B;
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].ids, expected[i].ids) << B << ' ' << i;
      EXPECT_EQ(found[i].ended, expected[i].ended) << B << ' ' << i;
      EXPECT_NEAR(found[i].log_probability, expected[i].log_probability, 1e-4) << B << ' ' << i;
    }
  }
}

Ids greedy(Decoder& decoder, const Ids& prompt, size_t count) {
  Session session(decoder, 64, kF32);
  std::span<const float> logits = decoder.forward(session, prompt);
  Ids out;
  while (out.size() < count) {
    out.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    if (out.size() < count) logits = decoder.forward(session, {&out.back(), 1});
  }
  return out;
}

TEST(BeamSearch, OneBeamIsGreedyAndEndsWhereItDoes) {
  Model model(test::fixture("text_model"));
  const Ids prompt = {3, 1, 4, 1, 5};
  const Ids expected = greedy(*model.decoder, prompt, 20);
  const auto open = search(*model.decoder, prompt, 1, {20, {}});
  EXPECT_EQ(open[0].ids, expected);
  EXPECT_FALSE(open[0].ended);
  const int32_t end = expected[7];
  const auto first = size_t(std::find(expected.begin(), expected.end(), end) - expected.begin());
  const auto ended = search(*model.decoder, prompt, 1, {20, [end](int32_t id) { return id == end; }});
  EXPECT_EQ(ended[0].ids, Ids(expected.begin(), expected.begin() + int64_t(first)));
  EXPECT_TRUE(ended[0].ended);
}

// Beams that fork take over another beam's cache: a wrong one would give other probabilities than a fresh cache does.
TEST(BeamSearch, ForkedCachesAreThoseOfTheText) {
  for (const char* path : {"text_model", "hf/qwen3", "hf/opt", "hf/mistral_sliding_window"}) {
    Model model(test::fixture(path));
    Decoder& decoder = *model.decoder;
    const Ids prompt = {3, 1, 4, 1, 5};
    const int64_t n = std::min<int64_t>(24, decoder.config().n_ctx - int64_t(prompt.size()));
    const int64_t capacity = int64_t(prompt.size()) + n;
    CpuBeams engine(decoder, 4, capacity, kF32);
    BeamSearch beams(engine, {n, {}});
    beams.start(prompt);
    while (beams.step()) {
    }
    const auto texts = beams.texts();
    ASSERT_EQ(texts.size(), 4u);
    EXPECT_EQ(beams.tokens_run(), 4 * (n - 1));
    for (const Hypothesis& text : texts) {
      ASSERT_EQ(int64_t(text.ids.size()), n);
      Ids ids = prompt;
      ids.insert(ids.end(), text.ids.begin(), text.ids.end());
      Session fresh(decoder, capacity, kF32);
      double sum = 0;
      decoder.forward(fresh, ids, Decoder::Want::all, [&](int64_t first, int64_t count, const float* logits) {
        const int64_t V = decoder.config().n_vocab;
        for (int64_t m = 0; m < count; ++m)
          if (const int64_t at = first + m + 1; at >= int64_t(prompt.size()) && at < int64_t(ids.size()))
            sum += double(logits[m * V + ids[size_t(at)]]) - kernels::log_sum_exp(logits + m * V, V);
      });
      EXPECT_NEAR(text.log_probability, sum, 1e-3) << path;
    }
    EXPECT_GE(texts[0].score(), texts[3].score()) << path;
  }
}

TEST(BeamSearch, UnitedBeamsSkipWhatNoneNeeds) {
  Model model(test::fixture("text_model"));
  Decoder& decoder = *model.decoder;
  const Ids prompt = {3, 1, 4, 1, 5, 9, 2, 6};
  Thresholds thresholds;
  thresholds.t.assign(size_t(decoder.config().n_layers), {0.3f, 0.05f, 0.3f, 0.05f});
  const auto options = [&](bool unite) { return SparsityOptions{thresholds, 0, false, unite}; };
  Session one(decoder, 16, kF32), a(decoder, 16, kF32), b(decoder, 16, kF32);
  for (Session* session : {&one, &a}) decoder.forward(*session, prompt);
  b.copy(a, 0);
  EXPECT_EQ(b.length(), int64_t(prompt.size()));

  decoder.set_sparsity(options(true));
  const Ids next = {7};
  const auto view = decoder.forward(one, next);
  const std::vector<float> alone(view.begin(), view.end());
  const double alone_share = decoder.sparsity_counts().share();
  EXPECT_GT(alone_share, 0.1);
  // Two beams with the same token need the same inputs: one sparse token each.
  Session* const both[] = {&a, &b};
  decoder.set_sparsity(options(true));
  const auto same = decoder.forward(both, Ids{7, 7});
  EXPECT_EQ(decoder.sparsity_counts().share(), alone_share);
  for (size_t row = 0; row < 2; ++row)
    for (size_t v = 0; v < alone.size(); ++v) ASSERT_NEAR(same[row * alone.size() + v], alone[v], 1e-4) << row;
  // With different ones the union is smaller than either, and dense beams count nothing.
  decoder.set_sparsity(options(true));
  decoder.forward(both, Ids{11, 30});
  EXPECT_LT(decoder.sparsity_counts().share(), alone_share);
  EXPECT_GT(decoder.sparsity_counts().share(), 0);
  EXPECT_EQ(decoder.sparsity_counts().tokens, 2);
  decoder.set_sparsity(options(false));
  decoder.forward(both, Ids{11, 30});
  EXPECT_EQ(decoder.sparsity_counts().tokens, 0);
}

TEST(BeamSearch, WhatDoesNotFitIsAnError) {
  Model model(test::fixture("text_model"));
  Decoder& decoder = *model.decoder;
  EXPECT_THAT([&] { CpuBeams(decoder, 0, 16, kF32); }, ThrowsMessage<Error>(HasSubstr("0 beams")));
  EXPECT_THAT([&] { CpuBeams(decoder, 65, 16, kF32); }, ThrowsMessage<Error>(HasSubstr("1 to 64")));
  Session a(decoder, 16, kF32), b(decoder, 16, kF32), wide(decoder, 32, kF32);
  decoder.forward(a, Ids{1, 2});
  Session* const both[] = {&a, &b};
  EXPECT_THAT([&] { decoder.forward(both, Ids{1, 2}); }, ThrowsMessage<Error>(HasSubstr("2 and 0 tokens")));
  EXPECT_THAT([&] { b.copy(a, 1); }, ThrowsMessage<Error>(HasSubstr("cannot agree in 1")));
  EXPECT_THAT([&] { wide.copy(a, 0); }, ThrowsMessage<Error>(HasSubstr("capacity")));
  // The cache of 4 has room for two tokens behind this prompt; a third need not be run.
  CpuBeams engine(decoder, 2, 4, kF32);
  BeamSearch beams(engine, {100, {}});
  beams.start(Ids{1, 2});
  while (beams.step()) {
  }
  EXPECT_EQ(beams.texts()[0].ids.size(), 3u);
}

}  // namespace
}  // namespace lacuna::model
