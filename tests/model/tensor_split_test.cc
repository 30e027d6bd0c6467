// tests/model/tensor_split_test.cc - what shards have of a layer: their products together are the whole one's.
#include "model/tensor_split.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/linear.h"
#include "matrices.h"

namespace lacuna::model {
namespace {

using layout::Family;
using layout::Id;
using testing::HasSubstr;
using testing::ThrowsMessage;

Config config_of(int64_t n_embd, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, int64_t n_ff) {
  Config config;
  config.n_layers = 1;
  config.n_embd = n_embd;
  config.n_heads = n_heads;
  config.n_kv_heads = n_kv_heads;
  config.head_dim = head_dim;
  config.n_ff = n_ff;
  return config;
}

/// A layer of random weights with biases.
struct RandomLayer {
  RandomLayer(const Config& c, Id id, layout::Params params) {
    const int64_t q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
    add(Input::attn_in, "attn_q", id, {q, c.n_embd}, params);
    add(Input::attn_in, "attn_k", id, {kv, c.n_embd}, params);
    add(Input::attn_in, "attn_v", id, {kv, c.n_embd}, params);
    add(Input::attn_out, "attn_output", id, {c.n_embd, q}, params);
    add(Input::ffn_in, "ffn_gate", id, {c.n_ff, c.n_embd}, params);
    add(Input::ffn_in, "ffn_up", id, {c.n_ff, c.n_embd}, params);
    add(Input::ffn_down, "ffn_down", id, {c.n_embd, c.n_ff}, params);
  }
  void add(Input input, const char* name, Id id, layout::Shape shape, layout::Params params) {
    const test::Matrix& matrix = matrices.emplace_back(test::random_matrix(id, shape, params, matrices.size() + 1));
    std::vector<float>& bias = biases.emplace_back();
    for (int64_t n = 0; n < shape.N; ++n) bias.push_back(float(n % 7) - 3);
    weights[size_t(input)].push_back(
        {fmt::format("blk.0.{}.weight", name), matrix.layout, shape, matrix.bytes, bias, matrix.params});
  }
  std::deque<test::Matrix> matrices;
  std::deque<std::vector<float>> biases;
  LayerWeights weights;
};

/// y = W x + bias, summed in double precision.
std::vector<float> product(const kernels::WeightView& weight, std::span<const float> x) {
  std::vector<float> y(size_t(weight.shape.N));
  kernels::reference_linear(weight, {x.data(), 1, int64_t(x.size())}, {y.data(), weight.shape.N});
  return y;
}

/// Sum of |w x| of each output, and of its bias.
std::vector<double> sizes(const kernels::WeightView& weight, std::span<const float> x) {
  const auto [N, K] = weight.shape;
  std::vector<float> w(size_t(N * K));
  layout::decode_rows(*weight.layout, weight.shape, weight.bytes, 0, N, w.data(), weight.params);
  std::vector<double> out(size_t(N), 3);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) out[size_t(n)] += std::abs(double(w[size_t(n * K + k)]) * double(x[size_t(k)]));
  return out;
}

/// Places in layout::all() but for those of diffusion transformers, whose products round inputs by the largest of all.
std::vector<size_t> layouts_of_language_models() {
  std::vector<size_t> out;
  for (size_t i = 0; i < layout::all().size(); ++i)
    if (layout::all()[i].family != Family::tensor_core) out.push_back(i);
  return out;
}

class SplitLayout : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Each, SplitLayout, testing::ValuesIn(layouts_of_language_models()),
                         [](const auto& each) { return std::string(layout::all()[each.param].name); });

// Outputs of q, k, v, gate and up are those of the unsplit matrix, exactly; o and down are sums of the shards' results,
// each rounded to float once.
TEST_P(SplitLayout, ShardsTogetherAreTheWhole) {
  const layout::Layout& stored = layout::all()[GetParam()];
  const bool groups = stored.family == Family::grouped || stored.family == Family::bitmask;
  ThreadPool pool(2);
  const Config c = config_of(256, 8, 4, 128, 1280);  // 5 superblocks: uneven
  std::vector<layout::Params> all_params = {{}};
  if (groups) all_params = {{.group_size = 64}, {.group_size = 0}};
  if (stored.family == Family::group_sparse) all_params = {{.group_size = 16}};
  for (const layout::Params& params : all_params) {
    const RandomLayer layer(c, stored.id, params);
    for (const int64_t shards : {1, 2, 3}) {
      if (shards == 3 && stored.zigzag) continue;  // two heads of 128 are one superblock of k and v
      SCOPED_TRACE(fmt::format("{} shards, groups of {}", shards, params.group_size));
      const TensorSplit split(c, {&layer.weights, 1}, shards);
      for (size_t input = 0; input < size_t(kInputs); ++input) {
        const auto& whole = layer.weights[input];
        const int64_t K = whole[0].shape.K;
        Rng rng(input + 1);
        std::vector<float> x;
        for (int64_t k = 0; k < K; ++k) x.push_back(float(rng.normal()));
        for (size_t part = 0; part < whole.size(); ++part) {
          const std::vector<float> expected = product(whole[part], x);
          std::vector<float> rows;
          std::vector<double> sums(expected.size());
          for (int64_t shard = 0; shard < shards; ++shard) {
            const Share inputs = split.inputs(shard, Input(input));
            const auto weights = split.cut(layer.weights, Input(input), shard, pool);
            ASSERT_EQ(weights.size(), whole.size());
            const kernels::WeightView& mine = weights[part].view;
            ASSERT_EQ(mine.shape.K, inputs.count);
            ASSERT_EQ(layout::first_bad_row(*mine.layout, mine.shape, mine.bytes, mine.params), -1);
            const auto outline = split.outline(layer.weights, Input(input), shard);
            EXPECT_EQ(outline[part].shape, mine.shape);
            EXPECT_EQ(outline[part].params, mine.params);
            const auto y = product(mine, std::span(x).subspan(size_t(inputs.first), size_t(inputs.count)));
            rows.insert(rows.end(), y.begin(), y.end());
            for (size_t n = 0; n < std::min(y.size(), sums.size()); ++n) sums[n] += double(y[n]);
          }
          if (Input(input) == Input::attn_in || Input(input) == Input::ffn_in) {
            EXPECT_EQ(rows, expected) << whole[part].name;
            continue;
          }
          const std::vector<double> size = sizes(whole[part], x);
          ASSERT_EQ(rows.size(), size_t(shards) * expected.size());
          for (size_t n = 0; n < sums.size(); ++n)
            ASSERT_NEAR(sums[n], double(expected[n]), double(shards + 1) * 0x1p-24 * size[n]) << whole[part].name;
        }
      }
    }
  }
}

TEST(TensorSplit, SharesAreEvenAsFarAsBlocksAllow) {
  const Config c = config_of(256, 12, 6, 64, 1408);  // 44 times 32
  const RandomLayer rows(c, Id::q8_0, {}), zigzag(c, Id::zz4_k, {});
  const TensorSplit four(c, {&rows.weights, 1}, 4);
  EXPECT_EQ(four.shards(), 4);
  EXPECT_EQ(four.kv_heads(0), (Share{0, 1}));
  EXPECT_EQ(four.kv_heads(1), (Share{1, 2}));
  EXPECT_EQ(four.heads(1), (Share{2, 4}));
  EXPECT_EQ(four.kv_heads(3), (Share{4, 2}));
  EXPECT_EQ(four.ff(0), (Share{0, 352}));
  EXPECT_EQ(four.ff(3), (Share{1056, 352}));
  EXPECT_EQ(four.inputs(1, Input::attn_out), (Share{128, 256}));
  EXPECT_EQ(four.inputs(1, Input::ffn_in), (Share{0, 256}));
  EXPECT_EQ(four.inputs(1, Input::ffn_down), (Share{352, 352}));
  EXPECT_EQ(four.rows(0, 1001), (Share{0, 252}));
  EXPECT_EQ(four.rows(3, 1001), (Share{756, 245}));
  const TensorSplit two(c, {&zigzag.weights, 1}, 2);  // k and v are a superblock and a half
  EXPECT_EQ(two.kv_heads(0), (Share{0, 4}));
  EXPECT_EQ(two.kv_heads(1), (Share{4, 2}));
  EXPECT_EQ(two.ff(0), (Share{0, 768}));  // 3 superblocks, and 2 and a half
  EXPECT_EQ(two.ff(1), (Share{768, 640}));
}

// One bias is added once, whatever the number of shards.
TEST(TensorSplit, BiasesOfSumsAreTheFirstShards) {
  const Config c = config_of(64, 4, 4, 32, 128);
  const RandomLayer layer(c, Id::f16, {});
  const TensorSplit split(c, {&layer.weights, 1}, 2);
  EXPECT_EQ(split.outline(layer.weights, Input::attn_out, 0)[0].bias.size(), 64u);
  EXPECT_TRUE(split.outline(layer.weights, Input::attn_out, 1)[0].bias.empty());
  EXPECT_TRUE(split.outline(layer.weights, Input::ffn_down, 1)[0].bias.empty());
  EXPECT_EQ(split.outline(layer.weights, Input::attn_in, 1)[0].bias.size(), 64u);
}

TEST(TensorSplit, ErrorsNameTheTensorAndWhatWorks) {
  const auto refuses = [](const Config& c, Id id, int64_t shards, const char* what) {
    const RandomLayer layer(c, id, {.group_size = layout::get(id).family == Family::grouped ? 128 : 0});
    EXPECT_THAT([&] { TensorSplit(c, {&layer.weights, 1}, shards); }, ThrowsMessage<Error>(HasSubstr(what)));
  };
  refuses(config_of(256, 8, 8, 64, 1024), Id::zz4_k, 4,
          "blk.0.attn_q.weight: 256 outputs of zz4_k lie together, so that 8 key-value heads can be split over 1 to 2 "
          "shards, not 4");
  refuses(
      config_of(256, 16, 8, 64, 512), Id::q4_K, 5,
      "blk.0.attn_output.weight: 256 inputs of q4_K lie together, so that 8 key-value heads can be split over 1 to 4 "
      "shards, not 5");
  refuses(config_of(256, 8, 8, 128, 512), Id::q6_K, 3,
          "blk.0.ffn_down.weight: 256 inputs of q6_K lie together, so that 512 feed-forward values can be split over 1 "
          "to 2 shards, not 3");
  refuses(
      config_of(256, 8, 8, 128, 512), Id::gq4, 8,
      "blk.0.ffn_down.weight: 128 inputs of gq4 lie together, so that 512 feed-forward values can be split over 1 to "
      "4 shards, not 8");
  refuses(config_of(256, 8, 2, 128, 512), Id::f16, 4, "the 2 key-value heads can be split over 1 to 2 shards, not 4");
}

}  // namespace
}  // namespace lacuna::model
