// A block alone computes what the decoder's layer does, for every family, and only recomputes what a mask changes.
#include "model/block.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/rng.h"
#include "model/decoder.h"
#include "model/support.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

constexpr int64_t kWindow = 16;

/// What the first layer reads for two windows.
std::vector<float> inputs(const Model& model, std::vector<int32_t>& ids) {
  Rng rng(3);
  const Config& c = model.decoder->config();
  for (int64_t i = 0; i < 2 * kWindow; ++i) ids.push_back(int32_t(rng.below(uint64_t(c.n_vocab))));
  std::vector<float> x(size_t(2 * kWindow * c.n_embd));
  for (int64_t w = 0; w < 2; ++w)
    model.decoder->embed(std::span(ids).subspan(size_t(w * kWindow), size_t(kWindow)), 0,
                         x.data() + w * kWindow * c.n_embd);
  return x;
}

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(b[i]) * b[i];
  }
  return std::sqrt(error / norm);
}

TEST(Block, ChainedBlocksAreTheDecoder) {
  for (const char* path :
       {"hf/llama_mha", "hf/llama_odd_heads", "hf/llama_bias", "hf/mistral_sliding_window", "hf/qwen2", "hf/qwen3",
        "hf/opt", "hf/opt_post_norm_projected", "gguf_models/llama_gqa_rope_llama3.gguf", "text_model"}) {
    Model model(test::fixture(path));
    const Config& config = model.decoder->config();
    std::vector<int32_t> ids;
    std::vector<float> x = inputs(model, ids);
    // The decoder's inputs of every group.
    std::vector<std::array<std::vector<float>, kInputs>> seen(static_cast<size_t>(config.n_layers));
    model.decoder->set_observer([&](int64_t layer, Input input, const float* in, int64_t M, int64_t K, int64_t) {
      auto& all = seen[size_t(layer)][size_t(input)];
      all.insert(all.end(), in, in + M * K);
    });
    for (int64_t w = 0; w < 2; ++w) {
      Session session(*model.decoder, kWindow, kernels::KvType::f32);
      model.decoder->forward(session, std::span(ids).subspan(size_t(w * kWindow), size_t(kWindow)),
                             Decoder::Want::layers, {});
    }
    for (int64_t layer = 0; layer < config.n_layers; ++layer) {
      Block block(model.checkpoint, config, layer, 2, kWindow, model.pool);
      Block::Pass pass;
      block.run(x.data(), {}, 4, pass);
      const auto& expected = seen[size_t(layer)];
      // The same float operations; parts of a group may be added up in another order: some 2^-24 a layer.
      EXPECT_LT(relative(pass.attn_in, expected[0]), 1e-5) << path << layer;
      EXPECT_LT(relative(pass.attended, expected[1]), 1e-5) << path << layer;
      EXPECT_LT(relative(pass.ffn_in, expected[2]), 1e-5) << path << layer;
      EXPECT_LT(relative(pass.ffn_down, expected[3]), 1e-5) << path << layer;
      x = pass.out;

      const auto first = Decoder::load(model.checkpoint, model.pool, {.progress = false, .first_layers = layer + 1});
      EXPECT_EQ(first->n_layers(), layer + 1);
      Session session(*first, kWindow, kernels::KvType::f32);
      const auto out = first->run_first(session, std::span(ids).first(size_t(kWindow)), false);
      EXPECT_EQ(session.length(), kWindow);
      EXPECT_LT(relative({out.begin(), out.end()}, {x.begin(), x.begin() + int64_t(out.size())}), 1e-5)
          << path << layer;
    }
  }
}

TEST(Block, RerunEqualsAFullRun) {
  for (const char* path : {"text_model", "hf/opt_post_norm_projected"}) {
    Model model(test::fixture(path));
    const Config& config = model.decoder->config();
    std::vector<int32_t> ids;
    const std::vector<float> x = inputs(model, ids);
    Block block(model.checkpoint, config, 0, 2, kWindow, model.pool);
    Block::Pass dense, full, part;
    block.run(x.data(), {}, 4, dense);
    for (int64_t m = 0; m < kMatrices; ++m) {
      const Matrix matrix = Matrix(m);
      if (!block.has(matrix)) continue;
      Block::Masks masks{};
      masks[size_t(m)].t = 0.3f;
      block.run(x.data(), masks, 4, full);
      block.rerun(x.data(), {&matrix, 1}, masks, 4, dense, part);
      EXPECT_EQ(part.out, full.out) << path << ' ' << m;
      EXPECT_GT(relative(part.out, dense.out), 1e-5) << path << ' ' << m;
      const auto width = size_t(config.n_embd);
      for (size_t token = 0; token < 4; ++token)
        for (size_t i = 0; i < width; ++i)
          ASSERT_EQ(part.out[token * width + i], dense.out[token * width + i]) << "the first positions stay dense";
    }
  }
}

TEST(ColumnNorms, AreThoseOfTheDecodedWeights) {
  Model model(test::fixture("text_model"));
  const io::Tensor& gate = model.checkpoint.require("blk.0.ffn_gate.weight");
  const io::Tensor& up = model.checkpoint.require("blk.0.ffn_up.weight");
  const int64_t K = gate.shape.K;
  std::vector<double> squares(static_cast<size_t>(K), 0.0);
  for (const io::Tensor* tensor : {&gate, &up}) {
    std::vector<float> w(size_t(tensor->shape.N * K));
    layout::decode_rows(*tensor->layout, tensor->shape, tensor->bytes, 0, tensor->shape.N, w.data());
    for (size_t i = 0; i < w.size(); ++i) squares[i % size_t(K)] += double(w[i]) * double(w[i]);
  }
  const std::vector<float> norms =
      column_norms(model.checkpoint, model.decoder->config(), 0, Input::ffn_in, model.pool);
  ASSERT_EQ(int64_t(norms.size()), K);
  for (size_t k = 0; k < norms.size(); ++k) EXPECT_NEAR(norms[k], std::sqrt(squares[k]), 1e-5 * norms[k]);
}

}  // namespace
}  // namespace lacuna::model
