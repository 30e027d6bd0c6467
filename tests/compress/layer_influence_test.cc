// Which layers do least, on tiny nets.
#include "compress/layer_influence.h"

#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "compress/net.h"
#include "core/error.h"
#include "core/rng.h"
#include "model/config.h"
#include "test_support.h"

namespace lacuna::compress {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kWindow = 16, kWindows = 5;

std::vector<int32_t> random_ids(int64_t n_vocab) {
  Rng rng(1);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kWindow * kWindows; ++i) ids.push_back(int32_t(rng.below(uint64_t(n_vocab))));
  return ids;
}

TEST(LayerInfluence, IsOneLessTheMeanCosineOfEveryFamily) {
  for (const char* model : {"hf/llama_mha", "hf/qwen3", "hf/mistral", "hf/opt", "hf/opt_post_norm_projected"}) {
    const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture(model));
    const auto config = model::read_config(checkpoint);
    const std::vector<int32_t> ids = random_ids(config.n_vocab);
    const Samples samples = choose_samples(kWindow * kWindows, {.samples = kWindows, .seq_len = kWindow}, "ids");
    const std::vector<double> got = block_influence(checkpoint, ids, samples, {.progress = false});
    ASSERT_EQ(int64_t(got.size()), config.n_layers) << model;
    // All windows in one batch, token by token in double.
    const c10::NoGradGuard no_grad;
    const Net net(checkpoint);
    at::Tensor hidden =
        net.embed(at::tensor(std::vector<int64_t>(ids.begin(), ids.end())).reshape({kWindows, kWindow}));
    for (int64_t l = 0; l < config.n_layers; ++l) {
      const at::Tensor next = net.forward(net.load_layer(l), hidden);
      const at::Tensor a = hidden.to(at::kDouble).flatten(0, 1), b = next.to(at::kDouble).flatten(0, 1);
      double cosines = 0;
      for (int64_t t = 0; t < a.size(0); ++t)
        cosines += (a[t] * b[t]).sum().item<double>() / (a[t].norm().item<double>() * b[t].norm().item<double>());
      EXPECT_NEAR(got[size_t(l)], 1 - cosines / double(a.size(0)), 1e-5) << model << " layer " << l;
      hidden = next;
    }
  }
}

TEST(LayerInfluence, WhatStaysOfTheNetRunsAsIfTheLayerWereSkipped) {
  const c10::NoGradGuard no_grad;
  for (const char* model : {"hf/llama_mha", "gguf_models/qwen2.gguf", "hf/opt"}) {
    const io::Checkpoint whole = io::Checkpoint::open(test::fixture(model));
    io::Checkpoint shorter = io::Checkpoint::open(test::fixture(model));
    shorter.drop_layers(std::vector<int64_t>{0});
    const Net net(whole), rest(shorter);
    const at::Tensor ids = at::tensor(std::vector<int64_t>{1, 5, 2, 9, 4}).unsqueeze(0);
    at::Tensor a = net.embed(ids), b = rest.embed(ids);
    for (int64_t l = 1; l < net.config().n_layers; ++l) a = net.forward(net.load_layer(l), a);
    ASSERT_EQ(rest.config().n_layers, net.config().n_layers - 1);
    for (int64_t l = 0; l < rest.config().n_layers; ++l) b = rest.forward(rest.load_layer(l), b);
    EXPECT_TRUE(net.logits(net.load_head(), a).equal(rest.logits(rest.load_head(), b))) << model;
  }
}

TEST(LayerInfluence, TheLeastInfluentialGo) {
  const std::vector<double> influence = {0.5, 0.1, 0.3, 0.1, 0.2};
  EXPECT_THAT(least_influential(influence, 1), ElementsAre(3));  // of equal ones the later
  EXPECT_THAT(least_influential(influence, 2), ElementsAre(1, 3));
  EXPECT_THAT(least_influential(influence, 4), ElementsAre(1, 2, 3, 4));
  EXPECT_TRUE(least_influential(influence, 0).empty());
  EXPECT_THROW(least_influential(influence, 5), Error);
}

}  // namespace
}  // namespace lacuna::compress
