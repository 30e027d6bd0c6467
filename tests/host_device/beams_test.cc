// tests/host_device/beams_test.cc - beams on a device that is the host: which token, key and weight goes where, against
// the CPU's beams and against texts that run from the start. What kernels compute is tested elsewhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "loaded_model.h"
#include "model/beam_search.h"
#include "model/cpu_beams.h"
#include "model/cuda_decoder.h"
#include "model/synth.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

using layout::Id;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Ids = std::vector<int32_t>;

constexpr int64_t kContext = 40;

struct Kind {
  Id id;
  bool biases;
};
void PrintTo(const Kind& kind, std::ostream* out) {
  *out << layout::get(kind.id).name << (kind.biases ? " with biases" : "");
}

/// Random weights on the CPU and on the device; widths that are no multiple of 256.
struct Both {
  explicit Both(const Kind& kind, CudaDecoderOptions options = {}) {
    const bool tied = kind.biases || kind.id == Id::zz8;
    const ModelShape shape = {
        "small", kind.biases ? "qwen2" : "llama", 2, 192, 8, 4, 128, 320, 301, 64, 1e-5, 10000, 1, tied, kind.biases};
    const std::string path = (folder.path() / "small.gguf").string();
    ThreadPool pool(2);
    synthesize(shape, path, {.layout = kind.id, .head_layout = Id::f32, .progress = false}, pool);
    cpu = std::make_unique<test::LoadedModel>(path);
    options.progress = false;
    options.context = kContext;
    gpu = CudaDecoder::load(cpu->checkpoint, cpu->pool, device, options);
  }
  test::TempDir folder;
  cuda::Device device;
  std::unique_ptr<test::LoadedModel> cpu;
  std::unique_ptr<CudaDecoder> gpu;
};

std::vector<Hypothesis> search(BeamEngine& engine, const Ids& prompt, const BeamOptions& options) {
  BeamSearch beams(engine, options);
  beams.start(prompt);
  while (beams.step()) {
  }
  return beams.texts();
}

/// log p of the text after the prompt, run from the start by the device, token by token.
double log_probability(CudaDecoder& gpu, const Ids& prompt, const Hypothesis& text, int32_t end) {
  Ids ids = text.ids;
  if (text.ended) ids.push_back(end);
  gpu.truncate(0);
  std::span<const float> logits = gpu.forward(prompt);
  double sum = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    sum += double(logits[size_t(ids[i])]) - kernels::log_sum_exp(logits.data(), int64_t(logits.size()));
    if (i + 1 < ids.size()) logits = gpu.forward({&ids[i], 1});
  }
  return sum;
}

const Ids kPrompts[] = {{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}, {7}, {300, 2, 17}};  // a batch, and tokens one by one

class HostBeams : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Models, HostBeams,
                         testing::Values(Kind{Id::f32, false}, Kind{Id::f32, true}, Kind{Id::zz8, false},
                                         Kind{Id::zz8, true}));

// A key taken from another beam's slot, or a token given to another beam, would change the sums.
TEST_P(HostBeams, TextsAreAsLikelyAsWhenRunFromTheStart) {
  for (const bool deterministic : {false, true}) {
    Both both(GetParam(), {.deterministic = deterministic});
    for (const int64_t count : deterministic ? std::vector<int64_t>{3} : std::vector<int64_t>{1, 2, 4}) {
      const auto engine = both.gpu->make_beams(count);
      for (const Ids& prompt : kPrompts) {  // steps grow, and shrink
        const int32_t end = 11;
        const int64_t n = prompt.size() == 1 ? 14 : 9;
        const auto texts = search(*engine, prompt, {n, [](int32_t id) { return id == end || id % 5 == 0; }});
        ASSERT_EQ(int64_t(texts.size()), count);
        for (const Hypothesis& text : texts) {
          if (text.ended) continue;  // which token ended it is not kept
          EXPECT_EQ(int64_t(text.ids.size()), n);
          EXPECT_NEAR(text.log_probability, log_probability(*both.gpu, prompt, text, end), 1e-3)
              << count << " beams after " << prompt.size() << " tokens";
        }
      }
      const auto endless = search(*engine, kPrompts[0], {12, {}});
      for (const Hypothesis& text : endless)
        EXPECT_NEAR(text.log_probability, log_probability(*both.gpu, kPrompts[0], text, 0), 1e-3) << count;
    }
  }
}

class HostF32Beams : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Models, HostF32Beams, testing::Values(Kind{Id::f32, false}, Kind{Id::f32, true}));

// Products are not rounded on either: what differs is the order of sums.
TEST_P(HostF32Beams, TextsAreThoseOfTheCpu) {
  Both both(GetParam());
  for (const int64_t count : {1, 2, 3, 4}) {
    const auto gpu = both.gpu->make_beams(count);
    CpuBeams cpu(*both.cpu->decoder, count, kContext, kernels::KvType::f16);
    for (const Ids& prompt : kPrompts) {
      for (const bool ends : {false, true}) {
        const BeamOptions options = {16,
                                     ends ? [](int32_t id) { return id % 7 == 0; } : std::function<bool(int32_t)>()};
        const auto expected = search(cpu, prompt, options), found = search(*gpu, prompt, options);
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_EQ(found[i].ids, expected[i].ids) << count << " beams, text " << i;
          EXPECT_EQ(found[i].ended, expected[i].ended);
          EXPECT_NEAR(found[i].log_probability, expected[i].log_probability, 2e-3);
        }
      }
    }
  }
}

TEST(HostBeamsOnce, TheContextEndsTheTexts) {
  Both both({Id::f32, false});
  const auto engine = both.gpu->make_beams(3);
  const auto texts = search(*engine, kPrompts[0], {1000, {}});
  for (const Hypothesis& text : texts) {
    EXPECT_EQ(int64_t(text.ids.size()), kContext - int64_t(kPrompts[0].size()) + 1);
    EXPECT_NEAR(text.log_probability, log_probability(*both.gpu, kPrompts[0], text, 0), 1e-3);
  }
  const Ids whole(size_t{kContext}, 5);  // one token fits behind it, which is not run
  EXPECT_EQ(search(*engine, whole, {10, {}})[0].ids.size(), 1u);
  EXPECT_TRUE(search(*engine, whole, {0, {}})[0].ids.empty());
}

// The decoder goes on as if there had been no beams.
TEST(HostBeamsOnce, TheDecoderServesAgain) {
  Both both({Id::zz8, true});
  const auto run = [&] {
    both.gpu->truncate(0);
    const auto logits = both.gpu->forward(kPrompts[0]);
    const int32_t next = 9;
    std::vector<float> out(logits.begin(), logits.end());
    const auto more = both.gpu->forward({&next, 1});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  };
  const auto before = run();
  search(*both.gpu->make_beams(4), kPrompts[2], {12, {}});
  EXPECT_EQ(run(), before);
}

// One beam runs as single tokens do, sparse where they are; several are dense.
TEST(HostBeamsOnce, OneBeamIsSparseAndSeveralAreDense) {
  Both both({Id::zz8, false});
  both.gpu->count_inputs(true);
  Thresholds thresholds;
  thresholds.t.assign(2, {0.5f, 0.02f, 0.5f, 0.01f});
  const auto dense = search(*both.gpu->make_beams(3), kPrompts[0], {8, {}});
  both.gpu->set_sparsity(SparsityOptions{thresholds, 4, false});
  search(*both.gpu->make_beams(1), kPrompts[0], {8, {}});
  EXPECT_EQ(both.gpu->sparsity_counts().tokens, 7);
  const auto same = search(*both.gpu->make_beams(3), kPrompts[0], {8, {}});
  EXPECT_EQ(both.gpu->sparsity_counts().tokens, 7);
  for (size_t i = 0; i < dense.size(); ++i) EXPECT_EQ(same[i].ids, dense[i].ids);
}

TEST(HostBeamsOnce, WhatCannotBeIsAnError) {
  Both both({Id::f32, false});
  EXPECT_THAT([&] { both.gpu->make_beams(5); }, ThrowsMessage<Error>(HasSubstr("5 beams; --device cuda runs 1 to 4")));
  EXPECT_THAT([&] { both.gpu->make_beams(0); }, ThrowsMessage<Error>(HasSubstr("0 beams")));
  const auto engine = both.gpu->make_beams(2);
  EXPECT_THAT([&] { engine->start({}, 3); }, ThrowsMessage<Error>(HasSubstr("no tokens")));
  EXPECT_THAT([&] { engine->start(Ids(size_t{kContext} + 1, 5), 0); }, ThrowsMessage<Error>(HasSubstr("do not fit")));
  engine->start(Ids{1, 2}, 1);
  engine->step(Ids{0, 0}, Ids{3, 4});
  EXPECT_THAT([&] { engine->step(Ids{0, 0}, Ids{3, 4}); }, ThrowsMessage<Error>(HasSubstr("room for 1 tokens")));
  Both cpu_too({Id::f32, false}, {.gpu_layers = 1}), split({Id::f32, false}, {.shards = 2});
  EXPECT_THAT([&] { cpu_too.gpu->make_beams(2); }, ThrowsMessage<Error>(HasSubstr("--gpu-layers")));
  EXPECT_THAT([&] { split.gpu->make_beams(2); }, ThrowsMessage<Error>(HasSubstr("--gpu-split")));
}

}  // namespace
}  // namespace lacuna::model
