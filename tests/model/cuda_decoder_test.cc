// The decoder on a CUDA device against the one on the CPU, which is tested against transformers.
#include "model/cuda_decoder.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "io/gguf_writer.h"
#include "io/quantize.h"
#include "kernels/cuda/exchange.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda_support.h"
#include "model/beam_search.h"
#include "model/cuda_shard.h"
#include "model/decoder.h"
#include "model/support.h"
#include "model/synth.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kTokens = 24;

std::vector<int32_t> some_ids(int64_t count, int64_t n_vocab) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < count; ++t) ids.push_back(int32_t((t * 7919 + 13) % n_vocab));
  return ids;
}

/// Relative root mean square difference.
double difference(std::span<const float> expected, std::span<const float> found) {
  double error = 0, norm = 0;
  for (size_t v = 0; v < expected.size(); ++v) {
    const double d = double(found[v]) - double(expected[v]);
    error += d * d;
    norm += double(expected[v]) * double(expected[v]);
  }
  return std::sqrt(error / norm);
}

/// Largest relative root mean square difference of a token's logits.
double worst_difference(Decoder& cpu, CudaDecoder& gpu) {
  Session session(cpu, kTokens);
  double worst = 0;
  for (const int32_t id : some_ids(kTokens, cpu.config().n_vocab)) {
    const std::span<const float> expected = cpu.forward(session, {&id, 1});
    const std::span<const float> found = gpu.forward({&id, 1});
    const double relative = difference(expected, found);
    if (std::isnan(relative)) return relative;
    worst = std::max(worst, relative);
  }
  return worst;
}

/// A fixture's model stored in a zigzag layout, or another one with params.
struct Zigzag {
  explicit Zigzag(const char* name, layout::Id id = layout::Id::zz4_k, layout::Params params = {}) {
    Model source(test::fixture(std::string("hf/") + name));
    const std::string path = (folder.path() / "zigzag.gguf").string();
    io::quantize(source.checkpoint, path, {.layout = id, .params = params, .progress = false}, source.pool);
    model = std::make_unique<Model>(path);
  }
  test::TempDir folder;
  std::unique_ptr<Model> model;
};

/// A fixture's model whose layers mix layouts: where a tensor's name ends with one of these parts it has that layout,
/// else zz4_k. Names as in "0.attn_v" or "attn_v".
struct Mixed {
  Mixed(const char* name, const std::vector<std::pair<std::string, layout::Id>>& parts) {
    Model source(test::fixture(std::string("hf/") + name));
    std::map<layout::Id, io::Checkpoint> stored;
    const auto in = [&](layout::Id id) -> const io::Checkpoint& {
      if (const auto found = stored.find(id); found != stored.end()) return found->second;
      const std::string path = (folder.path() / (std::string(layout::get(id).name) + ".gguf")).string();
      io::quantize(source.checkpoint, path, {.layout = id, .progress = false}, source.pool);
      return stored.emplace(id, io::Checkpoint::open(path)).first->second;
    };
    const io::Checkpoint& base = in(layout::Id::zz4_k);
    std::vector<const io::Tensor*> tensors;
    std::vector<io::TensorPlan> plan;
    for (const io::Tensor& tensor : base.tensors()) {
      const auto part = std::ranges::find_if(
          parts, [&](const auto& p) { return tensor.layout->zigzag && tensor.name.ends_with(p.first + ".weight"); });
      tensors.push_back(part == parts.end() ? &tensor : &in(part->second).require(tensor.name));
      plan.push_back({tensor.name, tensors.back()->layout, tensors.back()->dims, tensors.back()->params});
    }
    const std::string path = (folder.path() / "mixed.gguf").string();
    io::GgufWriter writer(path, base.metadata(), plan);
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t]->layout->zigzag && tensors[t]->layout->id != layout::Id::zz4_k)
        writer.set_source_sha256(tensors[t]->name, std::string(64, '0'));
      writer.write(tensors[t]->bytes);
    }
    writer.finish();
    model = std::make_unique<Model>(path);
  }
  test::TempDir folder;
  std::unique_ptr<Model> model;
};

class CudaDecoderTest : public test::CudaTest {
 protected:
  std::unique_ptr<CudaDecoder> load(Model& model, CudaDecoderOptions options = {}) {
    options.progress = false;
    options.context = kTokens;
    return CudaDecoder::load(model.checkpoint, model.pool, device(), options);
  }
  /// Of what `compress` and `quantize` make with groups, with and without biases, in any order of sums and in a fixed
  /// one.
  void expect_logits_of_the_cpu(layout::Id id, int64_t group_size) {
    for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {
      const Zigzag stored(name, id, {.group_size = group_size});
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(fmt::format("{} in {}, fixed order {}", name, layout::get(id).name, deterministic));
        const auto gpu = load(*stored.model, {.deterministic = deterministic});
        EXPECT_LT(worst_difference(*stored.model->decoder, *gpu), 0.03);
      }
    }
  }
};

// Weights that are not rounded further: what differs is the order of float sums (1e-6 each) over a few layers and the
// cache's f16, which rounds values that differ in the last bit to neighbours now and then.
TEST_F(CudaDecoderTest, LogitsAreThoseOfTheCpu) {
  for (const char* name : {"llama_mha", "llama_gqa_rope_llama3", "llama_bf16", "llama_f16", "llama_rope_yarn", "qwen3",
                           "qwen2_heads_of_8", "mistral_heads_of_8"}) {
    SCOPED_TRACE(name);
    Model model(test::fixture(std::string("hf/") + name));
    const auto gpu = load(model);
    EXPECT_LT(worst_difference(*model.decoder, *gpu), 2e-3);
    EXPECT_EQ(gpu->length(), kTokens);
  }
}

// A product is off by 1.2e-3 of its size (factors and sums of eight in f16). These small models make up to 15 times as
// much of it: 8-bit inputs, 0.6% off, change the logits of the first by 9%. On an H100 its largest difference was
// 0.014.
TEST_F(CudaDecoderTest, ZigzagLogitsAreThoseOfTheCpu) {
  for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {  // the latter with biases
    SCOPED_TRACE(name);
    const Zigzag zigzag(name);
    EXPECT_LT(worst_difference(*zigzag.model->decoder, *load(*zigzag.model)), 0.03);
  }
}

TEST_F(CudaDecoderTest, EveryZigzagLayoutsLogitsAreThoseOfTheCpu) {
  using layout::Id;
  for (const Id id : {Id::zz2_k, Id::zz3_k, Id::zz5_k, Id::zz6_k, Id::zz8}) {
    SCOPED_TRACE(layout::get(id).name);
    const Zigzag zigzag("llama_mha", id);
    EXPECT_LT(worst_difference(*zigzag.model->decoder, *load(*zigzag.model)), 0.03);
  }
}

TEST_F(CudaDecoderTest, GroupedLogitsAreThoseOfTheCpu) {
  using layout::Id;
  for (const auto& [id, group_size] :
       {std::pair<Id, int64_t>{Id::gq2, 32}, {Id::gq3, 0}, {Id::gq4, 16}, {Id::gq8, 32}, {Id::bm4, 32}, {Id::bm16, 0}})
    expect_logits_of_the_cpu(id, group_size);
}

TEST_F(CudaDecoderTest, GroupSparseLogitsAreThoseOfTheCpu) {
  using layout::Id;
  for (const auto& [id, group_size] :
       {std::pair<Id, int64_t>{Id::gs2, 16}, {Id::gs3, 32}, {Id::gs4, 16}, {Id::gs8, 128}, {Id::gs16, 8}})
    expect_logits_of_the_cpu(id, group_size);
  EXPECT_THAT(load(*Zigzag("llama_mha", Id::gs4, {.group_size = 16}).model)->explain(),
              HasSubstr("attn_q, attn_k, attn_v: gs4 with groups of 16, stream-K, "));
}

// What `quantize --layout zigzag` makes of a file with a mix, and more: runs of one and of two parts, in any place, row
// layouts among them, in both layers.
TEST_F(CudaDecoderTest, MixedLogitsAreThoseOfTheCpu) {
  using layout::Id;
  const std::vector<std::pair<std::string, Id>> mixes[] = {
      {{"attn_v", Id::zz6_k}, {"ffn_down", Id::zz6_k}},
      {{"0.attn_q", Id::zz5_k}, {"attn_v", Id::zz5_k}, {"ffn_up", Id::zz8}, {"0.ffn_down", Id::zz3_k}},
      {{"attn_k", Id::f16}, {"0.ffn_gate", Id::f16}, {"1.ffn_up", Id::f16}, {"0.attn_output", Id::f16}},
      {{"0.attn_q", Id::f16}, {"0.attn_v", Id::zz6_k}, {"ffn_gate", Id::zz6_k}, {"1.ffn_down", Id::f16}},
  };
  for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {  // the latter with biases
    for (size_t i = 0; i < std::size(mixes); ++i) {
      SCOPED_TRACE(fmt::format("{}, mix {}", name, i));
      const Mixed mixed(name, mixes[i]);
      const auto gpu = load(*mixed.model);
      EXPECT_LT(worst_difference(*mixed.model->decoder, *gpu), 0.03);
      if (i == 0) {
        EXPECT_THAT(gpu->explain(), HasSubstr("attn_q, attn_k, attn_v: zz4_k, dense "));
        EXPECT_THAT(gpu->explain(), HasSubstr("; then zz6_k, dense "));
        EXPECT_THAT(gpu->explain(), HasSubstr("ffn_down: zz6_k, dense "));
      }
      if (i == 2) {
        EXPECT_THAT(gpu->explain(), HasSubstr("; then f16, in rows"));
      }
    }
  }
}

/// With inputs left out a product's error moves the logits of these small models by as much as in ZigzagLogits..., or
/// somewhat more; an input too many or too few moves them by 0.1 and more.
constexpr double kSparseBound = 0.06;

/// Thresholds that leave a third of all inputs out, whatever the inputs are: no rounding moves one over its threshold.
Thresholds third_by_norms(const Config& config) {
  Thresholds thresholds;
  thresholds.criterion = Criterion::wina;
  thresholds.t.assign(size_t(config.n_layers), {1e-30f, 1e-30f, 1e-30f, 1e-30f});
  thresholds.norms.resize(size_t(config.n_layers));
  const auto widths = input_widths(config);
  for (auto& layer : thresholds.norms)
    for (size_t i = 0; i < widths.size(); ++i)
      for (int64_t k = 0; k < widths[i]; ++k) layer[i].push_back(k % 3 == 0 ? 0.0f : 1.5f);
  return thresholds;
}

/// Every run and every row part of a group leaves out an input's values: all of them, so that none lies near the
/// threshold. In these small models one that does moves the logits by half of their size, on the CPU alone too.
void expect_left_out_as_on_the_cpu(Model& model, CudaDecoder& gpu) {
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t input = 0; input < kInputs; ++input) {
      SCOPED_TRACE(fmt::format("layer {}, input {}", layer, input));
      Thresholds thresholds;
      thresholds.t.assign(size_t(model.decoder->config().n_layers), {});
      thresholds.t[layer][input] = 1e30f;
      model.decoder->set_sparsity(SparsityOptions{thresholds, 2, false});
      gpu.set_sparsity(SparsityOptions{thresholds, 2, false});
      gpu.truncate(0);
      EXPECT_LT(worst_difference(*model.decoder, gpu),
                kSparseBound);  // the gate is taken by the product where that can
      gpu.count_inputs(true);
      gpu.truncate(0);
      EXPECT_LT(worst_difference(*model.decoder, gpu), kSparseBound);  // in a launch of its own
      EXPECT_GT(gpu.sparsity_counts().share(), 0);
      EXPECT_DOUBLE_EQ(gpu.sparsity_counts().share(), model.decoder->sparsity_counts().share());
      model.decoder->set_sparsity(std::nullopt);
      gpu.truncate(0);
      EXPECT_GT(worst_difference(*model.decoder, gpu), 0.1);  // the device still leaves inputs out
      gpu.count_inputs(false);
    }
  }
}

TEST_F(CudaDecoderTest, MixedLeavesOutWhatTheCpuLeavesOut) {
  using layout::Id;
  const Mixed mixed("llama_mha", {{"attn_v", Id::zz6_k}, {"0.ffn_up", Id::zz6_k}, {"1.ffn_down", Id::zz6_k}});
  expect_left_out_as_on_the_cpu(*mixed.model, *load(*mixed.model));
}

TEST_F(CudaDecoderTest, MixedWithRowsLeavesOutWhatTheCpuLeavesOut) {
  using layout::Id;
  const Mixed mixed("llama_mha", {{"attn_v", Id::f16}, {"0.ffn_up", Id::f16}, {"1.ffn_down", Id::zz6_k}});
  expect_left_out_as_on_the_cpu(*mixed.model, *load(*mixed.model));
}

// Biases come with the sums here, not before them.
TEST_F(CudaDecoderTest, InAFixedOrderLogitsAreThoseOfTheCpu) {
  const Mixed mixed("qwen2_heads_of_8", {{"attn_v", layout::Id::zz6_k}, {"0.attn_k", layout::Id::f16}});
  EXPECT_LT(worst_difference(*mixed.model->decoder, *load(*mixed.model, {.deterministic = true})), 0.03);
}

TEST_F(CudaDecoderTest, AThousandTokensInAFixedOrderAreTheSameBits) {
  const Zigzag zigzag("qwen2_heads_of_8");
  Thresholds thresholds;
  thresholds.t.assign(size_t(zigzag.model->decoder->config().n_layers), {0.4f, 0.02f, 0.4f, 0.02f});
  const auto gpu = load(*zigzag.model, {.deterministic = true});
  const std::vector<int32_t> ids = some_ids(kTokens, gpu->config().n_vocab);
  for (const bool sparse : {false, true}) {
    gpu->set_sparsity(sparse ? std::optional(SparsityOptions{thresholds, 2, false}) : std::nullopt);
    std::vector<std::vector<float>> first;
    for (int64_t token = 0; token < 1000; ++token) {
      const int64_t place = token % kTokens;
      if (place == 0) gpu->truncate(0);
      const std::span<const float> logits = gpu->forward({&ids[size_t(place)], 1});
      if (token < kTokens) first.emplace_back(logits.begin(), logits.end());
      ASSERT_TRUE(std::ranges::equal(logits, first[size_t(place)], [](float a, float b) {
        return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
      })) << token;
    }
  }
}

TEST_F(CudaDecoderTest, GivenPlansAreUsedButInAFixedOrder) {
  const Zigzag zigzag("llama_mha");
  const auto standard = load(*zigzag.model);
  Thresholds thresholds;
  thresholds.level = 0.5;
  thresholds.t.assign(size_t(standard->config().n_layers), {0.4f, 0.02f, 0.4f, 0.02f});
  CudaDecoderOptions options;
  cuda::GemvPlan plan = cuda::kernel_plans(layout::get(layout::Id::zz4_k)).back();
  plan.segments = 3;
  for (const int percent : {0, 50})
    for (const CudaTuning& product : standard->tune(false))
      options.plans.set({product.product.layout, product.product.rows, product.product.K, percent}, plan);
  const auto uses = [&] {
    const auto gpu = load(*zigzag.model, options);
    gpu->set_sparsity(SparsityOptions{thresholds, 2, false});
    return gpu->explain();
  };
  EXPECT_THAT(uses(), HasSubstr("dense " + cuda::describe(plan)));
  EXPECT_THAT(uses(), HasSubstr("at 50% sparse " + cuda::describe(plan)));
  options.deterministic = true;
  EXPECT_THAT(uses(), testing::Not(HasSubstr(cuda::describe(plan))));
}

// Every kernel, in stream-K and slice-K, as units (gs4) and as chunks (gs8).
TEST_F(CudaDecoderTest, GivenPlansOfGroupsAreUsedButInAFixedOrder) {
  for (const layout::Id id : {layout::Id::gs4, layout::Id::gs8}) {
    const Zigzag stored("qwen2_heads_of_8", id, {.group_size = 16});
    const std::vector<CudaGroupsTuning> products = load(*stored.model)->tune_groups(false);
    ASSERT_FALSE(products.empty());
    for (cuda::GroupsPlan plan : cuda::groups_plans(layout::get(id), products[0].product.are_units())) {
      for (const cuda::Split split : {cuda::Split::stream, cuda::Split::slice}) {
        plan.split = split, plan.early = 3;
        CudaDecoderOptions options;
        for (const CudaGroupsTuning& product : products) {
          plan.blocks = int(2 * product.product.rows);
          options.plans.set(product.product, plan);
        }
        SCOPED_TRACE(cuda::describe(plan));
        const auto gpu = load(*stored.model, options);
        EXPECT_THAT(gpu->explain(), HasSubstr(fmt::format("{} warps, {} resident", plan.warps, plan.resident)));
        EXPECT_THAT(gpu->explain(), HasSubstr(split == cuda::Split::stream ? "stream-K, " : "slice-K, "));
        EXPECT_THAT(gpu->explain(), HasSubstr(", 3 early"));
        EXPECT_LT(worst_difference(*stored.model->decoder, *gpu), 0.03);
        options.deterministic = true;
        EXPECT_THAT(load(*stored.model, options)->explain(), testing::Not(HasSubstr(", 3 early")));
      }
    }
  }
}

TEST_F(CudaDecoderTest, TunedPlansOfGroupsChangeNoLogitsAndServeAgain) {
  for (const layout::Id id : {layout::Id::gs4, layout::Id::gs8}) {
    const Zigzag stored("llama_mha", id, {.group_size = 16});
    const auto gpu = load(*stored.model);
    const std::vector<CudaGroupsTuning> tuned = gpu->tune_groups(false);
    EXPECT_EQ(gpu->length(), 0);
    EXPECT_LT(worst_difference(*stored.model->decoder, *gpu), 0.03);
    CudaDecoderOptions options;
    for (const CudaGroupsTuning& tuning : tuned) {
      EXPECT_EQ(tuning.product.layout, id);
      EXPECT_GT(tuning.tuned_ms, 0);
      EXPECT_LE(tuning.tuned_ms, tuning.standard_ms);
      EXPECT_NO_THROW(cuda::check_plan(tuning.product, tuning.plan));
      options.plans.set(tuning.product, tuning.plan);
    }
    EXPECT_FALSE(tuned.empty());
    EXPECT_EQ(load(*stored.model, options)->explain(), gpu->explain());
    EXPECT_TRUE(gpu->tune(false).empty()) << "no zigzag weights";
    EXPECT_THROW(load(*stored.model, {.deterministic = true})->tune_groups(false), Error);
  }
}

TEST_F(CudaDecoderTest, TunedPlansChangeNoLogitsAndServeAgain) {
  const Mixed mixed("llama_mha", {{"attn_v", layout::Id::zz6_k}});
  const auto gpu = load(*mixed.model);
  Thresholds thresholds;
  thresholds.level = 0.5;
  thresholds.t.assign(size_t(gpu->config().n_layers), {0.4f, 0.02f, 0.4f, 0.02f});
  std::vector<CudaTuning> tuned = gpu->tune(false);
  EXPECT_EQ(gpu->length(), 0);
  EXPECT_LT(worst_difference(*mixed.model->decoder, *gpu), 0.03);
  mixed.model->decoder->set_sparsity(SparsityOptions{thresholds, 2, false});
  gpu->set_sparsity(SparsityOptions{thresholds, 2, false});
  const std::vector<CudaTuning> sparse = gpu->tune(false);
  mixed.model->decoder->set_sparsity(gpu->sparsity());  // some inputs may be faster dense
  EXPECT_LT(worst_difference(*mixed.model->decoder, *gpu), 0.1);
  ASSERT_EQ(sparse.size(), tuned.size());
  tuned.insert(tuned.end(), sparse.begin(), sparse.end());
  CudaDecoderOptions options;
  std::set<layout::Id> layouts;
  for (const CudaTuning& tuning : tuned) {
    EXPECT_GT(tuning.standard_ms, 0);
    EXPECT_GT(tuning.tuned_ms, 0);
    options.plans.set(tuning.product, tuning.plan);
    layouts.insert(tuning.product.layout);
  }
  EXPECT_EQ(layouts, (std::set{layout::Id::zz4_k, layout::Id::zz6_k}));
  const auto again = load(*mixed.model, options);
  again->set_sparsity(SparsityOptions{thresholds, 2, false});
  EXPECT_EQ(again->explain(), gpu->explain());
  EXPECT_THROW(load(*mixed.model, {.deterministic = true})->tune(false), Error);
}

// One input is left out whole in the first layer, the next one in the second; the plans run the first of them dense, or
// both.
TEST_F(CudaDecoderTest, InputsThatThePlansRunDenseLeaveNothingOut) {
  const Zigzag zigzag("llama_mha");
  Model& model = *zigzag.model;
  const Config& c = model.decoder->config();
  const auto rows = [](int64_t N) { return (N + 255) / 256; };
  const int64_t q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  const std::array<std::pair<int64_t, int64_t>, kInputs> shapes = {{{rows(q) + 2 * rows(kv), c.n_embd},
                                                                    {rows(c.n_embd), q},
                                                                    {2 * rows(c.n_ff), c.n_embd},
                                                                    {rows(c.n_embd), c.n_ff}}};
  ASSERT_EQ(std::set(shapes.begin(), shapes.end()).size(), shapes.size()) << "products are told apart by their shapes";
  for (size_t first = 0; first < kInputs; ++first) {
    const size_t second = (first + 1) % kInputs;
    SCOPED_TRACE(first);
    SparsityOptions asked;
    asked.dense_prefix = 2;
    asked.thresholds.level = 0.5;
    asked.thresholds.t.assign(size_t(c.n_layers), {});
    asked.thresholds.t[0][first] = asked.thresholds.t[1][second] = 1e30f;
    CudaDecoderOptions options;
    cuda::GemvPlan plan = cuda::kernel_plans(layout::get(layout::Id::zz4_k)).front();
    plan.skips = false;
    for (const size_t input : {first, second}) {
      options.plans.set({layout::Id::zz4_k, shapes[input].first, shapes[input].second, 50}, plan);
      const auto gpu = load(model, options);
      gpu->set_sparsity(asked);
      gpu->count_inputs(true);
      const SparsityOptions used = gpu->sparsity().value();
      EXPECT_EQ(used.thresholds.t[0][first], 0);
      EXPECT_EQ(used.thresholds.t[1][second], input == first ? 1e30f : 0);
      model.decoder->set_sparsity(used);
      EXPECT_LT(worst_difference(*model.decoder, *gpu), kSparseBound);
      const SparsityCounts counts = gpu->sparsity_counts();
      EXPECT_EQ(counts.layers[0][first].inactive, 0);
      EXPECT_EQ(counts.layers[1][second].inactive, input == first ? counts.layers[1][second].inputs : 0);
      model.decoder->set_sparsity(asked);
      gpu->truncate(0);
      EXPECT_GT(worst_difference(*model.decoder, *gpu), 0.1);  // which the CPU shows when it leaves them out
      EXPECT_THAT(gpu->explain(), HasSubstr("at 50% dense: skipping does not pay"));
    }
  }
}

// q and k in zz4_k, v in zz6_k: one of the two products is to run dense, and all three matrices do.
TEST_F(CudaDecoderTest, ADensePlanOfOneProductHoldsForItsWholeInput) {
  const Mixed mixed("llama_mha", {{"attn_v", layout::Id::zz6_k}});
  Model& model = *mixed.model;
  const Config& c = model.decoder->config();
  const auto rows = [](int64_t N) { return (N + 255) / 256; };
  SparsityOptions asked;
  asked.thresholds.level = 0.5;
  asked.thresholds.t.assign(size_t(c.n_layers), {1e30f, 0, 0, 0});
  for (const auto& [id, n] :
       {std::pair{layout::Id::zz4_k, rows(c.n_heads * c.head_dim) + rows(c.n_kv_heads * c.head_dim)},
        std::pair{layout::Id::zz6_k, rows(c.n_kv_heads * c.head_dim)}}) {
    SCOPED_TRACE(layout::get(id).name);
    CudaDecoderOptions options;
    cuda::GemvPlan plan = cuda::kernel_plans(layout::get(id)).front();
    plan.skips = false;
    options.plans.set({id, n, c.n_embd, 50}, plan);
    const auto gpu = load(model, options);
    gpu->set_sparsity(asked);
    gpu->count_inputs(true);
    EXPECT_EQ(gpu->sparsity()->thresholds.t[0][0], 0);
    model.decoder->set_sparsity(std::nullopt);
    EXPECT_LT(worst_difference(*model.decoder, *gpu), 0.03);
    EXPECT_EQ(gpu->sparsity_counts().share(), 0);
  }
}

TEST_F(CudaDecoderTest, MixedLeavesOutByNorms) {
  using layout::Id;
  const Mixed mixed("llama_mha", {{"attn_v", Id::zz6_k}, {"0.ffn_up", Id::zz5_k}, {"1.ffn_down", Id::zz8}});
  Model& model = *mixed.model;
  const Thresholds thresholds = third_by_norms(model.decoder->config());
  model.decoder->set_sparsity(SparsityOptions{thresholds, 2, false});
  const auto gpu = load(model);
  gpu->set_sparsity(SparsityOptions{thresholds, 2, false});
  EXPECT_LT(worst_difference(*model.decoder, *gpu), kSparseBound);
}

// wina's norms make other inputs small: thresholds by magnitude with the same numbers leave out others.
TEST_F(CudaDecoderTest, ZigzagLeavesOutByNorms) {
  const Zigzag zigzag("llama_mha");
  Model& model = *zigzag.model;
  const Thresholds by_norms = third_by_norms(model.decoder->config());
  model.decoder->set_sparsity(SparsityOptions{by_norms, 2, false});
  const auto gpu = load(model);
  gpu->count_inputs(true);
  gpu->set_sparsity(SparsityOptions{by_norms, 2, false});
  EXPECT_LT(worst_difference(*model.decoder, *gpu), kSparseBound);
  const double expected = model.decoder->sparsity_counts().share(), found = gpu->sparsity_counts().share();
  gpu->count_inputs(false);  // the gate is then taken by the product
  gpu->truncate(0);
  EXPECT_LT(worst_difference(*model.decoder, *gpu), kSparseBound);
  gpu->count_inputs(true);
  EXPECT_GT(expected, 0.3);
  EXPECT_NEAR(found, expected, 1e-3);
  Thresholds by_magnitude = by_norms;
  by_magnitude.norms.clear();
  by_magnitude.criterion = Criterion::magnitude;
  gpu->truncate(0);
  gpu->set_sparsity(SparsityOptions{by_magnitude, 2, false});
  worst_difference(*model.decoder, *gpu);
  EXPECT_LT(gpu->sparsity_counts().share(), 0.1);

  Model rows(test::fixture("hf/llama_mha"));
  const auto other = load(rows);
  EXPECT_THAT(
      [&] {
        other->set_sparsity(SparsityOptions{by_norms, 2, false});
      },
      ThrowsMessage<Error>(HasSubstr("wina need zigzag")));
}

// A prompt is dense, as on the CPU; what is scored is not.
TEST_F(CudaDecoderTest, SeveralTokensAtOnceAreDense) {
  Model model(test::fixture("hf/llama_mha"));
  const auto gpu = load(model);
  const std::vector<int32_t> ids = some_ids(6, model.decoder->config().n_vocab);
  const auto copy = [](std::span<const float> logits) { return std::vector<float>(logits.begin(), logits.end()); };
  const std::vector<float> dense = copy(gpu->forward(ids));
  Thresholds thresholds;
  thresholds.t.assign(size_t(model.decoder->config().n_layers), {0.4f, 0.02f, 0.4f, 0.02f});
  gpu->set_sparsity(SparsityOptions{thresholds, 0, false});
  gpu->truncate(0);
  EXPECT_EQ(copy(gpu->forward(ids)), dense);
  gpu->truncate(0);
  std::vector<float> last;
  int64_t count = 0;
  gpu->score(ids, [&](int64_t first, int64_t n, const float* logits) {
    EXPECT_EQ(first, count);
    count += n;
    last.assign(logits, logits + model.decoder->config().n_vocab);
  });
  EXPECT_EQ(count, 6);
  EXPECT_NE(last, dense);
  gpu->set_sparsity(SparsityOptions{thresholds, 0, true});  // as if they had come one by one
  gpu->truncate(0);
  gpu->append(std::span(ids).first(5));
  EXPECT_EQ(copy(gpu->forward(std::span(ids).subspan(5))), last);
  gpu->set_sparsity(std::nullopt);
  gpu->truncate(0);
  gpu->append(std::span(ids).first(5));
  EXPECT_EQ(copy(gpu->forward(std::span(ids).subspan(5))), dense);
}

// An input near its threshold may fall on either side of it on the two devices; the fixtures' inputs are few.
TEST_F(CudaDecoderTest, LeavesOutWhatTheCpuLeavesOut) {
  Model model(test::fixture("hf/llama_mha"));
  Thresholds thresholds;
  thresholds.t.assign(size_t(model.decoder->config().n_layers), {0.4f, 0.02f, 0.4f, 0.02f});
  model.decoder->set_sparsity(SparsityOptions{thresholds, 2, false});
  const auto gpu = load(model);
  gpu->set_sparsity(SparsityOptions{thresholds, 2, false});
  gpu->count_inputs(true);
  const double with = worst_difference(*model.decoder, *gpu);
  const SparsityCounts expected = model.decoder->sparsity_counts(), found = gpu->sparsity_counts();
  EXPECT_GT(expected.share(), 0.05);
  EXPECT_NEAR(found.share(), expected.share(), 0.02);
  EXPECT_EQ(found.tokens, expected.tokens);
  model.decoder->set_sparsity(std::nullopt);
  gpu->truncate(0);
  const double without = worst_difference(*model.decoder, *gpu);  // the device still leaves inputs out
  EXPECT_LT(with, 0.02);
  EXPECT_GT(without, 2 * with);
}

/// A text's log-probability, run from the start, and the largest root mean square of its tokens' logits. forward(ids):
/// the last one's logits.
template <class Forward>
std::pair<double, double> run_alone(const Forward& forward, const std::vector<int32_t>& prompt,
                                    const Hypothesis& text) {
  std::span<const float> logits = forward(std::span<const int32_t>(prompt));
  double sum = 0, largest = 0;
  for (size_t i = 0; i < text.ids.size(); ++i) {
    double squares = 0;
    for (const float logit : logits) squares += double(logit) * double(logit);
    largest = std::max(largest, std::sqrt(squares / double(logits.size())));
    sum += double(logits[size_t(text.ids[i])]) - kernels::log_sum_exp(logits.data(), int64_t(logits.size()));
    if (i + 1 < text.ids.size()) logits = forward(std::span<const int32_t>(&text.ids[i], 1));
  }
  return {sum, largest};
}

/// Texts of `count` beams of 12 tokens each.
std::vector<Hypothesis> beam_texts(BeamEngine& engine, const std::vector<int32_t>& prompt) {
  BeamSearch search(engine, {12, {}});
  search.start(prompt);
  while (search.step()) {
  }
  return search.texts();
}

/// limit: of a token's logits, as above. A text's log-probability is a sum over its tokens of a logit and their
/// log-sum-exp; errors of size limit times the logits' in both add up as a random walk does, and five times that is the
/// bound. The device's own tokens, one by one, differ in the order of float32 sums and in f16 keys on their edges
/// alone.
void expect_beams_of_the_cpu(Model& model, CudaDecoder& gpu, double limit) {
  for (const size_t prompt_tokens : {size_t{3}, size_t{11}}) {  // one by one, and a batch
    const std::vector<int32_t> prompt = some_ids(int64_t(prompt_tokens), gpu.config().n_vocab);
    for (const int64_t count : {1, 2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{} beams after {} tokens", count, prompt_tokens));
      const auto texts = beam_texts(*gpu.make_beams(count), prompt);
      ASSERT_EQ(int64_t(texts.size()), count);
      std::set<std::vector<int32_t>> different;
      for (const Hypothesis& text : texts) {
        different.insert(text.ids);
        ASSERT_EQ(text.ids.size(), 12u);
        Session session(*model.decoder, kTokens);
        const auto [expected, size] =
            run_alone([&](auto ids) { return model.decoder->forward(session, ids); }, prompt, text);
        EXPECT_NEAR(text.log_probability, expected, 5 * std::sqrt(2 * 12.0) * limit * size);
        gpu.truncate(0);
        const auto [alone, unused] = run_alone([&](auto ids) { return gpu.forward(ids); }, prompt, text);
        EXPECT_NEAR(text.log_probability, alone, 5 * std::sqrt(2 * 12.0) * std::min(limit, 5e-3) * size);
      }
      EXPECT_EQ(different.size(), texts.size());
      gpu.truncate(0);
    }
  }
}

TEST_F(CudaDecoderTest, BeamsAreAsLikelyAsOnTheCpu) {
  // With grouped heads, biases, norms of heads, a window.
  for (const char* name : {"llama_mha", "llama_gqa_rope_llama3", "llama_bf16", "llama_f16", "qwen3", "qwen2_heads_of_8",
                           "mistral_heads_of_8"}) {
    SCOPED_TRACE(name);
    Model model(test::fixture(std::string("hf/") + name));
    expect_beams_of_the_cpu(model, *load(model), 2e-3);
  }
}

TEST_F(CudaDecoderTest, ZigzagBeamsAreAsLikelyAsOnTheCpu) {
  using layout::Id;
  for (const bool deterministic : {false, true}) {
    for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {
      SCOPED_TRACE(name);
      const Zigzag zigzag(name);
      expect_beams_of_the_cpu(*zigzag.model, *load(*zigzag.model, {.deterministic = deterministic}), 0.03);
    }
    const Mixed mixed("qwen2_heads_of_8", {{"0.attn_q", Id::f16}, {"attn_v", Id::zz6_k}, {"1.ffn_down", Id::zz8}});
    expect_beams_of_the_cpu(*mixed.model, *load(*mixed.model, {.deterministic = deterministic}), 0.03);
  }
}

TEST_F(CudaDecoderTest, GroupedAndGroupSparseBeamsAreAsLikelyAsOnTheCpu) {
  using layout::Id;
  for (const auto& [id, group_size] : {std::pair{Id::gq4, int64_t{16}}, {Id::gs4, int64_t{16}}, {Id::gs16, int64_t{8}}})
    for (const bool deterministic : {false, true}) {
      SCOPED_TRACE(layout::get(id).name);
      const Zigzag stored("qwen2_heads_of_8", id, {.group_size = group_size});
      expect_beams_of_the_cpu(*stored.model, *load(*stored.model, {.deterministic = deterministic}), 0.03);
    }
}

TEST_F(CudaDecoderTest, BeamsInAFixedOrderAreTheSameBitsAndLeaveTheDecoderAsItWas) {
  const Mixed mixed("qwen2_heads_of_8", {{"attn_v", layout::Id::zz6_k}, {"0.attn_k", layout::Id::f16}});
  const auto gpu = load(*mixed.model, {.deterministic = true});
  const std::vector<int32_t> prompt = some_ids(11, gpu->config().n_vocab);
  const auto logits = [&] {
    gpu->truncate(0);
    const std::span<const float> view = gpu->forward(prompt);
    return std::vector<float>(view.begin(), view.end());
  };
  const std::vector<float> before = logits();
  const auto engine = gpu->make_beams(4);
  const auto first = beam_texts(*engine, prompt);
  for (int run = 0; run < 20; ++run) {
    const auto again = beam_texts(*engine, prompt);
    for (size_t i = 0; i < first.size(); ++i) {
      ASSERT_EQ(again[i].ids, first[i].ids) << run;
      ASSERT_EQ(again[i].log_probability, first[i].log_probability) << run;
    }
  }
  EXPECT_EQ(logits(), before);
}

/// All logits of `ids`, one by one.
std::vector<std::vector<float>> one_by_one(CudaDecoder& gpu, std::span<const int32_t> ids) {
  std::vector<std::vector<float>> out;
  for (const int32_t& id : ids) {
    const std::span<const float> logits = gpu.forward({&id, 1});
    out.emplace_back(logits.begin(), logits.end());
  }
  return out;
}

/// A batch rounds weights and inputs to f16, which leaves a product off by 4e-4 of its size (root mean square: two
/// roundings of 2^-11 at most); these small models make up to 15 times as much of it, and more on a token of 58. The
/// products of single tokens with zigzag weights are off by 1.2e-3 themselves. Largest on an H200: 0.012.
void expect_batches_of_single_tokens(Model& model, cuda::Device& device) {
  CudaDecoderOptions options;
  options.context = 60;
  options.progress = false;
  const auto gpu = CudaDecoder::load(model.checkpoint, model.pool, device, options);
  const std::vector<int32_t> ids = some_ids(58, model.decoder->config().n_vocab);
  const auto expected = one_by_one(*gpu, ids);
  double worst = 0;
  // Pieces of all kinds: what is shorter than a batch goes one by one, between batches and after them.
  for (const std::vector<int64_t>& pieces : {std::vector<int64_t>{58}, {17, 1, 3, 5, 8, 24}, {9, 12, 37}, {5, 53}}) {
    gpu->truncate(0);
    int64_t at = 0;
    for (const int64_t n : pieces) {
      const auto piece = std::span(ids).subspan(size_t(at), size_t(n));
      at += n;
      if (n == 12) {
        gpu->append(piece);
        continue;
      }
      worst = std::max(worst, difference(expected[size_t(at - 1)], gpu->forward(piece)));
      EXPECT_EQ(gpu->length(), at);
    }
  }
  // Single tokens after a batch, as generation goes on after a prompt; then a batch over what was truncated.
  gpu->truncate(0);
  gpu->append(std::span(ids).first(33));
  for (size_t t = 33; t < 40; ++t) worst = std::max(worst, difference(expected[t], gpu->forward({&ids[t], 1})));
  gpu->truncate(20);
  worst = std::max(worst, difference(expected[49], gpu->forward(std::span(ids).subspan(20, 30))));
  // Every token's logits, in order.
  gpu->truncate(0);
  int64_t scored = 0;
  gpu->score(ids, [&](int64_t first, int64_t n, const float* logits) {
    EXPECT_EQ(first, scored);
    scored += n;
    const auto n_vocab = size_t(model.decoder->config().n_vocab);
    for (int64_t t = 0; t < n; ++t)
      worst = std::max(worst, difference(expected[size_t(first + t)], {logits + size_t(t) * n_vocab, n_vocab}));
  });
  EXPECT_EQ(scored, 58);
  EXPECT_EQ(gpu->length(), 58);
  EXPECT_LT(worst, 0.03);
  EXPECT_GT(worst, 0);
  testing::Test::RecordProperty("worst", std::to_string(worst));
}

TEST_F(CudaDecoderTest, BatchesGiveTheLogitsOfSingleTokens) {
  for (const char* name : {"llama_mha", "llama_gqa_rope_llama3", "llama_bf16", "llama_f16", "llama_rope_yarn", "qwen3",
                           "qwen2_heads_of_8", "mistral_heads_of_8"}) {
    SCOPED_TRACE(name);
    Model model(test::fixture(std::string("hf/") + name));
    expect_batches_of_single_tokens(model, device());
  }
}

TEST_F(CudaDecoderTest, ZigzagBatchesGiveTheLogitsOfSingleTokens) {
  for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {
    SCOPED_TRACE(name);
    expect_batches_of_single_tokens(*Zigzag(name).model, device());
    // Runs of several layouts, and row parts, in one operand.
    using layout::Id;
    const Mixed mixed(
        name, {{"0.attn_q", Id::f16}, {"0.attn_v", Id::zz6_k}, {"ffn_gate", Id::zz6_k}, {"1.ffn_down", Id::f16}});
    expect_batches_of_single_tokens(*mixed.model, device());
  }
}

// Inputs that are found by their columns' norms, so that rounding moves none over its threshold.
TEST_F(CudaDecoderTest, BatchesLeaveOutWhatSingleTokensDo) {
  for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {
    SCOPED_TRACE(name);
    const Zigzag zigzag(name);
    Thresholds thresholds;
    thresholds.criterion = Criterion::wina;
    const Config& config = zigzag.model->decoder->config();
    thresholds.t.assign(size_t(config.n_layers), {1e-30f, 1e-30f, 1e-30f, 1e-30f});
    thresholds.norms.resize(size_t(config.n_layers));
    for (auto& layer : thresholds.norms)
      for (size_t i = 0; i < size_t(kInputs); ++i)
        for (int64_t k = 0; k < input_widths(config)[i]; ++k) layer[i].push_back(k % 3 == 0 ? 0.0f : 1.5f);
    const auto gpu = load(*zigzag.model);
    gpu->count_inputs(true);
    const std::vector<int32_t> ids = some_ids(kTokens, config.n_vocab);
    const auto dense = one_by_one(*gpu, ids);
    const auto n_vocab = size_t(config.n_vocab);
    std::vector<std::vector<float>> logits[2];
    SparsityCounts counts[2];
    for (const bool together : {false, true}) {
      gpu->set_sparsity(SparsityOptions{thresholds, 3, together});
      gpu->truncate(0);
      gpu->score(ids, [&](int64_t, int64_t count, const float* found) {
        for (size_t t = 0; t < size_t(count); ++t)
          logits[together].emplace_back(found + t * n_vocab, found + (t + 1) * n_vocab);
      });
      counts[together] = gpu->sparsity_counts();
      EXPECT_EQ(counts[together].tokens, kTokens - 3);
    }
    double worst = 0, effect = 0;
    for (size_t t = 0; t < ids.size(); ++t) {
      worst = std::max(worst, difference(logits[0][t], logits[1][t]));
      effect = std::max(effect, difference(dense[t], logits[1][t]));
    }
    EXPECT_LT(worst, 0.03);
    EXPECT_GT(effect, 0.1);
    for (size_t l = 0; l < counts[0].layers.size(); ++l)
      for (size_t i = 0; i < size_t(kInputs); ++i)
        EXPECT_EQ(counts[0].layers[l][i].inactive, counts[1].layers[l][i].inactive);
  }
}

TEST_F(CudaDecoderTest, GroupedAndGroupSparseBatchesGiveTheLogitsOfSingleTokens) {
  using layout::Id;
  for (const char* name : {"llama_mha", "qwen2_heads_of_8"}) {
    for (const auto& [id, group_size] : {std::pair<Id, int64_t>{Id::gs4, 16}, {Id::gs16, 8}, {Id::gq4, 32}}) {
      SCOPED_TRACE(fmt::format("{} in {}", name, layout::get(id).name));
      expect_batches_of_single_tokens(*Zigzag(name, id, {.group_size = group_size}).model, device());
    }
  }
}

// Groups that are larger than the work space for their weights, with slices that begin within a part: each output is
// the same sum wherever its slice begins.
// HostDecoder's test of this name counts that the products are sliced.
TEST_F(CudaDecoderTest, SlicesOfAGroupGiveTheSameBits) {
  const ModelShape shape = {"sliced", "llama", 2, 256, 8, 4, 128, 768, 3001, 64, 1e-5, 10000, 1, false, false};
  using layout::Id;
  for (const auto& [id, group_size] : {std::pair{Id::f16, int64_t{0}}, {Id::q4_K, 0}, {Id::zz4_k, 0}, {Id::gs4, 16}}) {
    SCOPED_TRACE(layout::get(id).name);
    test::TempDir folder;
    const std::string path = (folder.path() / "sliced.gguf").string();
    ThreadPool pool(2);
    synthesize(shape, path,
               {.layout = id, .head_layout = Id::f16, .params = {.group_size = group_size}, .progress = false}, pool);
    Model model(path);
    const std::vector<int32_t> ids = some_ids(60, shape.n_vocab);
    const auto scored = [&](const CudaDecoderOptions& options) {
      const auto gpu = load(model, options);
      std::vector<float> out;
      gpu->score(std::span(ids).first(size_t(kTokens)), [&](int64_t, int64_t count, const float* logits) {
        out.insert(out.end(), logits, logits + count * shape.n_vocab);
      });
      return out;
    };
    // 256 outputs of 1024 inputs: 1024 of the 256 inputs that most groups read; and a fourth more.
    const int64_t least = cuda::operand_bytes(256, 1024);
    const std::vector<float> whole = scored({});
    for (const int64_t bytes : {int64_t{0}, least, least + least / 4})
      EXPECT_TRUE(std::ranges::equal(scored({.batch_weight_bytes = bytes}), whole, [](float a, float b) {
        return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
      })) << bytes;
  }
}

// The batches that a prompt is cut into, with a rest that is one and a rest of single tokens; then a token after it.
TEST_F(CudaDecoderTest, PromptsLongerThanABatch) {
  const ModelShape shape = {"long", "llama", 2, 256, 8, 4, 64, 512, 301, 1100, 1e-5, 10000, 1, false, false};
  for (const layout::Id id : {layout::Id::f16, layout::Id::zz4_k}) {
    SCOPED_TRACE(layout::get(id).name);
    test::TempDir folder;
    const std::string path = (folder.path() / "long.gguf").string();
    ThreadPool pool(2);
    synthesize(shape, path, {.layout = id, .head_layout = layout::Id::f16, .progress = false}, pool);
    Model model(path);
    CudaDecoderOptions options;
    options.context = shape.n_ctx;
    options.progress = false;
    const auto gpu = CudaDecoder::load(model.checkpoint, model.pool, device(), options);
    const std::vector<int32_t> ids = some_ids(2 * kMostBatch + 18, shape.n_vocab);
    const auto expected = one_by_one(*gpu, ids);
    for (const int64_t count : {kMostBatch + 3, 2 * kMostBatch + 17}) {
      gpu->truncate(0);
      const auto check = [&](std::span<const int32_t> next) {
        const std::span<const float> found = gpu->forward(next);
        // As in BatchesGiveTheLogitsOfSingleTokens.
        EXPECT_LT(difference(expected[size_t(gpu->length() - 1)], found), 0.03) << gpu->length() << " tokens";
      };
      check(std::span(ids).first(size_t(count)));
      check({&ids[size_t(count)], 1});
      EXPECT_EQ(gpu->length(), count + 1);
    }
  }
}

TEST_F(CudaDecoderTest, GenerationGoesOnAfterABatch) {
  Model model(test::fixture("hf/llama_gqa_rope_llama3"));
  CudaDecoderOptions options;
  options.context = 60;
  options.progress = false;
  const auto gpu = CudaDecoder::load(model.checkpoint, model.pool, device(), options);
  const std::vector<int32_t> ids = some_ids(30, model.decoder->config().n_vocab);
  const auto generate = [&](const auto& prompt) {
    gpu->truncate(0);
    prompt();
    std::vector<int32_t> out = {ids.back()};
    for (int64_t t = 0; t < 20; ++t) {
      const std::span<const float> logits = gpu->forward({&out.back(), 1});
      out.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    }
    return out;
  };
  const auto expected = generate([&] {
    for (size_t t = 0; t < 29; ++t) gpu->append({&ids[t], 1});
  });
  EXPECT_EQ(generate([&] { gpu->append(std::span(ids).first(29)); }), expected);
  gpu->truncate(0);
  gpu->append(std::span(ids).first(29));
  gpu->follow(ids.back(), 20);  // the device knows where the batch ended
  gpu->wait();
  EXPECT_EQ(gpu->length(), 49);
  gpu->truncate(48);
  const std::span<const float> logits = gpu->forward({&expected[19], 1});
  EXPECT_EQ(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()), expected[20]);
}

TEST_F(CudaDecoderTest, FollowsTheMostLikelyTokens) {
  Model model(test::fixture("hf/llama_mha"));
  const auto gpu = load(model);
  std::vector<int32_t> ids = {3};
  std::vector<float> last;
  for (int64_t t = 0; t < 12; ++t) {
    const std::span<const float> logits = gpu->forward({&ids.back(), 1});
    last.assign(logits.begin(), logits.end());
    ids.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  gpu->truncate(0);
  gpu->follow(3, 11);
  gpu->wait();
  EXPECT_EQ(gpu->length(), 11);
  const std::span<const float> logits = gpu->forward({&ids[11], 1});
  EXPECT_EQ(std::vector<float>(logits.begin(), logits.end()), last);  // row products are deterministic
}

// The first layers on the CPU, the others on the device: prompts, single tokens, what is scored and what follows.
TEST_F(CudaDecoderTest, LayersOnTheCpuGiveTheSameLogits) {
  for (const char* name : {"llama_mha", "llama_gqa_rope_llama3", "qwen3", "qwen2_heads_of_8"}) {
    SCOPED_TRACE(name);
    Model model(test::fixture(std::string("hf/") + name));
    const int64_t n_layers = model.decoder->config().n_layers;
    ASSERT_GE(n_layers, 2);
    const auto whole = load(model), split = load(model, {.gpu_layers = n_layers - 1});
    EXPECT_EQ(whole->cpu_layers(), 0);
    EXPECT_EQ(split->cpu_layers(), 1);
    EXPECT_EQ(split->weight_bytes(), whole->weight_bytes());
    EXPECT_THAT(split->explain(), HasSubstr("layers 0 to 0 on the CPU"));
    EXPECT_LT(worst_difference(*model.decoder, *split), 2e-3);
    EXPECT_EQ(split->length(), kTokens);

    const std::vector<int32_t> ids = some_ids(kTokens, model.decoder->config().n_vocab);
    const auto logits_of = [](std::span<const float> logits) {
      return std::vector<float>(logits.begin(), logits.end());
    };
    split->truncate(0);
    split->append(std::span(ids).first(9));  // a batch; then single tokens, what was truncated, a batch over it
    std::vector<float> single;
    for (size_t t = 9; t < ids.size(); ++t) single = logits_of(split->forward({&ids[t], 1}));
    split->truncate(4);
    EXPECT_LT(difference(single, split->forward(std::span(ids).subspan(4))), 0.03);  // of f16 weights and inputs
    split->truncate(0);
    int64_t scored = 0;
    split->score(ids, [&](int64_t first, int64_t n, const float* logits) {
      EXPECT_EQ(first, scored);
      scored += n;
      if (scored == kTokens) {
        EXPECT_LT(difference(single, {logits + (n - 1) * whole->config().n_vocab, single.size()}), 0.03);
      }
    });
    EXPECT_EQ(scored, kTokens);

    std::vector<int32_t> chosen = {3};
    split->truncate(0);
    for (int64_t t = 0; t < 12; ++t) {
      single = logits_of(split->forward({&chosen.back(), 1}));
      chosen.push_back(int32_t(std::ranges::max_element(single) - single.begin()));
    }
    split->truncate(0);
    split->follow(3, 11);
    split->wait();
    EXPECT_EQ(split->length(), 11);
    EXPECT_EQ(logits_of(split->forward({&chosen[11], 1})), single);
    EXPECT_THAT([&] { split->tune(false); }, ThrowsMessage<Error>(HasSubstr("leave out --gpu-layers")));
  }
  Model model(test::fixture("hf/llama_mha"));
  EXPECT_THAT([&] { load(model, {.gpu_layers = 100}); }, ThrowsMessage<Error>(HasSubstr("this model has")));
}

TEST_F(CudaDecoderTest, LayersOnTheCpuLeaveOutTheSameInputs) {
  const Zigzag zigzag("llama_mha");
  Model& model = *zigzag.model;
  const auto n_layers = size_t(model.decoder->config().n_layers);
  Thresholds thresholds;
  thresholds.t.assign(n_layers, {0.4f, 0.02f, 0.4f, 0.02f});
  const auto whole = load(model), split = load(model, {.gpu_layers = int64_t(n_layers) - 1});
  const std::vector<int32_t> ids = some_ids(kTokens, model.decoder->config().n_vocab);
  for (const bool by_norms : {false, true}) {
    SCOPED_TRACE(by_norms);
    if (by_norms) {
      const auto widths = input_widths(model.decoder->config());
      thresholds.norms.resize(n_layers);
      for (auto& layer : thresholds.norms)
        for (size_t i = 0; i < kInputs; ++i) {
          layer[i].resize(size_t(widths[i]));
          for (size_t k = 0; k < layer[i].size(); ++k) layer[i][k] = 0.5f + float(k % 3);
        }
    }
    for (const auto& gpu : {whole.get(), split.get()}) {
      gpu->truncate(0);
      gpu->set_sparsity(SparsityOptions{thresholds, 2, false});
      gpu->count_inputs(true);
      for (const int32_t& id : ids) gpu->forward({&id, 1});
    }
    const SparsityCounts expected = whole->sparsity_counts(), found = split->sparsity_counts();
    EXPECT_EQ(found.tokens, kTokens - 2);
    EXPECT_EQ(expected.tokens, kTokens - 2);
    ASSERT_EQ(found.layers.size(), n_layers);
    EXPECT_EQ(found.bytes, expected.bytes);
    EXPECT_GT(expected.share(), 0.05);
    for (size_t l = 0; l < n_layers; ++l)
      for (size_t i = 0; i < kInputs; ++i) {
        EXPECT_EQ(found.layers[l][i].inputs, expected.layers[l][i].inputs);
        EXPECT_NEAR(found.layers[l][i].share(), expected.layers[l][i].share(), 0.03);
      }
  }
}

TEST_F(CudaDecoderTest, SharesAreOfTheTokenAndChangeNothing) {
  const Zigzag zigzag("llama_mha");
  Model& model = *zigzag.model;
  for (const int64_t on_gpu : {int64_t{0}, model.decoder->config().n_layers - 1}) {
    const auto gpu = load(model, {.deterministic = true, .gpu_layers = on_gpu});
    const std::vector<int32_t> ids = some_ids(9, model.decoder->config().n_vocab);
    const auto expected = one_by_one(*gpu, ids);
    gpu->truncate(0);
    for (size_t t = 0; t < 5; ++t) gpu->forward({&ids[t], 1});
    const CudaShares shares = gpu->measure_shares();
    EXPECT_GT(shares.linear, 0);
    EXPECT_GT(shares.attention, 0);
    EXPECT_GT(shares.rest, 0);
    EXPECT_LT(shares.sum(), 10'000);  // ms; 0.1 are expected, under a sanitizer thousands
    EXPECT_EQ(gpu->length(), 5);
    for (size_t t = 5; t < 9; ++t) {
      const std::span<const float> logits = gpu->forward({&ids[t], 1});
      EXPECT_EQ(std::vector<float>(logits.begin(), logits.end()), expected[t]);
    }
  }
  // Nothing ran yet; inputs left out and counted.
  Thresholds thresholds;
  thresholds.t.assign(size_t(model.decoder->config().n_layers), {0.4f, 0.02f, 0.4f, 0.02f});
  for (const int64_t on_gpu : {int64_t{0}, model.decoder->config().n_layers - 1}) {
    const auto gpu = load(model, {.gpu_layers = on_gpu});
    EXPECT_GT(gpu->measure_shares().linear, 0);
    gpu->set_sparsity(SparsityOptions{thresholds, 0, false});
    gpu->count_inputs(true);
    for (const int32_t& id : some_ids(4, model.decoder->config().n_vocab)) gpu->forward({&id, 1});
    const SparsityCounts before = gpu->sparsity_counts();
    EXPECT_GT(gpu->measure_shares().linear, 0);
    const SparsityCounts after = gpu->sparsity_counts();
    EXPECT_EQ(before.tokens, 4);
    EXPECT_EQ(after.tokens, 4);
    EXPECT_GT(before.share(), 0.05);
    EXPECT_EQ(after.share(), before.share());
  }
  const auto full = load(model);
  for (int64_t t = 0; t < kTokens; ++t) {
    const int32_t id = 1;
    full->forward({&id, 1});
  }
  EXPECT_THAT([&] { full->measure_shares(); }, ThrowsMessage<Error>(HasSubstr("no room")));
}

// A card that is too small for all layers: the error says how many fit, and so many do.
TEST_F(CudaDecoderTest, ACardTooSmallSaysHowManyLayersFit) {
  Model model(test::fixture("hf/llama_mha"));
  const int64_t n_layers = model.decoder->config().n_layers;
  std::set<int64_t> seen;
  // Work space is 64 MiB and a little; a step is a quarter of the embedding, which only a whole model has there.
  for (int64_t limit = int64_t{66} << 20; limit > int64_t{64} << 20; limit -= 1536) {
    CudaDecoderOptions options;
    options.context = kTokens;
    options.progress = false;
    cuda::Device small({.index = 0, .memory_limit = limit});
    try {
      CudaDecoder::load(model.checkpoint, model.pool, small, options);
      limit -= int64_t{1} << 14;  // far from it
    } catch (const cuda::DoesNotFit& error) {
      if (error.layers == 0) break;
      ASSERT_LT(error.layers, n_layers);
      options.gpu_layers = error.layers;
      cuda::Device again({.index = 0, .memory_limit = limit});
      const auto split = CudaDecoder::load(model.checkpoint, model.pool, again, options);
      seen.insert(error.layers);
      EXPECT_LT(worst_difference(*model.decoder, *split), 2e-3);
    }
  }
  EXPECT_FALSE(seen.empty());
}

TEST_F(CudaDecoderTest, ACardTooSmallSaysWhichContextFits) {
  Model model(test::fixture("hf/llama_mha"));
  const int64_t position_bytes = 2 * 2 * 32 * int64_t(sizeof(f16));  // layers, keys and values, channels
  CudaDecoderOptions options;
  options.context = kTokens;
  options.progress = false;
  /// The context that would fit; kTokens: the whole one does.
  const auto fits = [&](int64_t limit) {
    cuda::Device small({.index = 0, .memory_limit = limit});
    try {
      return CudaDecoder::load(model.checkpoint, model.pool, small, options)->capacity();
    } catch (const cuda::DoesNotFit& error) {
      return error.positions;
    }
  };
  int64_t too_small = int64_t{64} << 20, enough = int64_t{66} << 20;
  while (enough - too_small > 1) {
    const int64_t middle = (too_small + enough) / 2;
    (fits(middle) == kTokens ? enough : too_small) = middle;
  }
  EXPECT_EQ(fits(enough - 1), kTokens - 1);
  EXPECT_EQ(fits(enough - 10 * position_bytes), kTokens - 10);
  EXPECT_EQ(fits(enough - (kTokens + 1) * position_bytes), 0);
  options.context = kTokens - 10;
  EXPECT_EQ(fits(enough - 10 * position_bytes), kTokens - 10);
}

// The candidates come from the device, or all logits where the sampler wants them: the same tokens as from the logits.
TEST_F(CudaDecoderTest, NextIsWhatTheSamplerTakesOfTheLogits) {
  Model model(test::fixture("hf/llama_mha"));
  const int64_t n_vocab = model.decoder->config().n_vocab;
  std::vector<SamplerOptions> all(6);
  all[0].temperature = 0;
  all[1].top_k = 0;
  all[2].temperature = 3, all[2].min_p = 0, all[2].top_p = 1;
  all[3].temperature = 3, all[3].repeat_penalty = 1.5f, all[3].top_k = 5;
  all[4].temperature = 0, all[4].repeat_penalty = 2, all[4].repeat_window = 4;
  all[5].temperature = 2, all[5].top_k = 1000;
  for (const int64_t gpu_layers : {int64_t{0}, model.decoder->config().n_layers - 1}) {
    const auto gpu = load(model, {.deterministic = true, .gpu_layers = gpu_layers});
    for (SamplerOptions& options : all) {
      SCOPED_TRACE(&options - all.data());
      options.seed = 7;
      Sampler on_device(options, n_vocab), on_host(options, n_vocab);
      std::vector<int32_t> tokens[2];
      for (const bool device : {true, false}) {
        gpu->truncate(0);
        Sampler& sampler = device ? on_device : on_host;
        std::vector<int32_t> ids = some_ids(5, n_vocab);
        for (const int32_t id : ids) sampler.accept(id);
        for (int64_t t = 0; t < 15; ++t) {
          const int32_t id = device ? gpu->next(ids, sampler) : sampler.sample(gpu->forward(ids));
          sampler.accept(id);
          tokens[device].push_back(id);
          ids = {id};
        }
      }
      EXPECT_EQ(tokens[true], tokens[false]);
      EXPECT_GT(std::set<int32_t>(tokens[true].begin(), tokens[true].end()).size(), 1u);
    }
  }
}

// Logits that are not numbers: the sampler's own error, with the tokens appended, as on the CPU.
TEST_F(CudaDecoderTest, NextRefusesLogitsThatAreNotNumbers) {
  Model source(test::fixture("gguf_models/llama_gqa_rope_llama3.gguf"));
  const test::TempDir folder;
  const std::string path = (folder.path() / "broken.gguf").string();
  std::vector<io::TensorPlan> plan;
  for (const io::Tensor& tensor : source.checkpoint.tensors())
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
  io::GgufWriter writer(path, source.checkpoint.metadata(), plan);
  for (const io::Tensor& tensor : source.checkpoint.tensors()) {
    if (tensor.name == "output_norm.weight") {
      const std::vector<float> bad(tensor.bytes.size() / sizeof(float), std::nanf(""));
      writer.write(std::as_bytes(std::span(bad)));
    } else {
      writer.write(tensor.bytes);
    }
  }
  writer.finish();
  Model model(path);
  const auto gpu = load(model);
  Sampler sampler({}, gpu->config().n_vocab);
  for (int64_t t = 1; t <= 3; ++t) {
    const int32_t id = 1;
    EXPECT_THAT(
        [&] {
          gpu->next({&id, 1}, sampler);
        },
        ThrowsMessage<BadLogits>(HasSubstr("NaN as the logit of token 0")));
    EXPECT_EQ(gpu->length(), t);
  }
}

// ---- layers split over shards ----

/// A small model of random weights whose layers can be split: two superblocks of keys, five of feed-forward values, and
/// a vocabulary that is no multiple of anything.
struct Splittable {
  explicit Splittable(layout::Id id, bool biases = false, layout::Params params = {}) {
    const ModelShape shape = {
        "small", biases ? "qwen2" : "llama", 2, 512, 8, 4, 128, 1280, 1003, 256, 1e-5, 10000, 1, biases, biases};
    const std::string path = (folder.path() / "small.gguf").string();
    ThreadPool pool(2);
    synthesize(shape, path, {.layout = id, .params = params, .weight_sparsity = sparsity_of(id), .progress = false},
               pool);
    model = std::make_unique<Model>(path);
  }
  static double sparsity_of(layout::Id id) { return layout::counts_kept(layout::get(id)) ? 0.4 : 0; }
  test::TempDir folder;
  std::unique_ptr<Model> model;
};

constexpr int64_t kSplitTokens = 40;

/// Logits of what decoding does: a batch's last token and those after it; then all of a longer batch, which is scored.
std::vector<std::vector<float>> all_logits(CudaDecoder& gpu) {
  const std::vector<int32_t> ids = some_ids(kSplitTokens, gpu.config().n_vocab);
  std::vector<std::vector<float>> out;
  const auto take = [&](std::span<const float> logits) { out.emplace_back(logits.begin(), logits.end()); };
  gpu.truncate(0);
  take(gpu.forward(std::span(ids).first(10)));
  for (size_t t = 10; t < 24; ++t) take(gpu.forward({&ids[t], 1}));
  gpu.truncate(0);
  const auto n_vocab = size_t(gpu.config().n_vocab);
  gpu.score(ids, [&](int64_t, int64_t count, const float* logits) {
    for (size_t t = 0; t < size_t(count); ++t) take({logits + t * n_vocab, n_vocab});
  });
  EXPECT_EQ(out.size(), 15u + size_t(kSplitTokens));
  return out;
}

/// The most likely tokens, chosen on the device, after a batch.
std::vector<int32_t> followed(CudaDecoder& gpu) {
  const std::vector<int32_t> ids = some_ids(10, gpu.config().n_vocab);
  std::vector<int32_t> out = {ids.back()};
  gpu.truncate(0);
  gpu.append(std::span(ids).first(9));
  for (int64_t t = 0; t < 12; ++t) {
    const std::span<const float> logits = gpu.forward({&out.back(), 1});
    out.push_back(int32_t(std::ranges::max_element(logits) - logits.begin()));
  }
  gpu.truncate(9);
  gpu.follow(out.front(), 12);
  gpu.wait();
  EXPECT_EQ(gpu.length(), 21);
  const std::span<const float> logits = gpu.forward({&out.back(), 1});
  out.push_back(int32_t(std::ranges::max_element(logits) - logits.begin()));
  return out;
}

double worst_of(const std::vector<std::vector<float>>& expected, const std::vector<std::vector<float>>& found) {
  double worst = 0;
  for (size_t t = 0; t < expected.size(); ++t) worst = std::max(worst, difference(expected[t], found[t]));
  return worst;
}

bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return std::ranges::equal(
        x, y, [](float u, float v) { return std::bit_cast<uint32_t>(u) == std::bit_cast<uint32_t>(v); });
  });
}

CudaDecoderOptions split_options(int64_t shards, bool deterministic = false) {
  CudaDecoderOptions options;
  options.context = kSplitTokens;
  options.progress = false;
  options.shards = shards;
  options.deterministic = deterministic;
  return options;
}

struct SplitCase {
  layout::Id id;
  int64_t group_size;
  double limit;  // as in LogitsAreThoseOfTheCpu, of weights in blocks; ZigzagLogits..., of products in halves
};
const SplitCase kSplitCases[] = {{layout::Id::f16, 0, 0.01},   {layout::Id::q8_0, 0, 0.01},
                                 {layout::Id::q4_K, 0, 0.01},  {layout::Id::zz4_k, 0, 0.03},
                                 {layout::Id::zz6_k, 0, 0.03}, {layout::Id::gq4, 64, 0.01},
                                 {layout::Id::bm4, 64, 0.01},  {layout::Id::gs4, 16, 0.03},
                                 {layout::Id::gs16, 16, 0.03}, {layout::Id::nm24_q4, 0, 0.01}};

// Two shards on one device round as one does but for the order of sums, and the f16 of what differs in the last bit.
TEST_F(CudaDecoderTest, TwoShardsGiveTheLogitsOfOne) {
  for (const bool biases : {false, true}) {
    for (const SplitCase& c : kSplitCases) {
      SCOPED_TRACE(fmt::format("{}, biases {}", layout::get(c.id).name, biases));
      const Splittable small(c.id, biases, {.group_size = c.group_size});
      Model& model = *small.model;
      for (const bool deterministic : {false, true}) {
        const auto one = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(1, deterministic));
        const auto two = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(2, deterministic));
        const double worst = worst_of(all_logits(*one), all_logits(*two));
        EXPECT_LT(worst, c.limit);
        EXPECT_GT(worst, 0);  // the sums are in another order
        EXPECT_NEAR(double(two->weight_bytes()), double(one->weight_bytes()), 0.05 * double(one->weight_bytes()));
        EXPECT_THAT(two->explain(), HasSubstr("2 shards, one device; the first has 4 of 8 heads and "));
        if (c.limit < 0.03) {
          EXPECT_EQ(followed(*two), followed(*one));
        }
      }
    }
  }
}

// One shard is the code of a decoder that is not split.
TEST_F(CudaDecoderTest, OneShardIsTheWholeModel) {
  const Splittable small(layout::Id::zz4_k);
  Model& model = *small.model;
  const auto whole = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(0, true));
  const auto one = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(1, true));
  EXPECT_TRUE(same_bits(all_logits(*whole), all_logits(*one)));
  EXPECT_EQ(whole->explain(), one->explain());
}

TEST_F(CudaDecoderTest, TwoShardsInAFixedOrderAreTheSameBits) {
  for (const layout::Id id : {layout::Id::zz4_k, layout::Id::q4_K}) {
    const Splittable small(id, true);
    Model& model = *small.model;
    const auto two = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(2, true));
    const auto expected = all_logits(*two);
    for (int round = 0; round < 20; ++round) EXPECT_TRUE(same_bits(all_logits(*two), expected));
    const auto again = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(2, true));
    EXPECT_TRUE(same_bits(all_logits(*again), expected));
  }
}

TEST_F(CudaDecoderTest, TwoShardsLeaveOutTheSameInputs) {
  const Splittable small(layout::Id::zz4_k);
  Model& model = *small.model;
  const auto one = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(1));
  const auto two = CudaDecoder::load(model.checkpoint, model.pool, device(), split_options(2));
  const SparsityOptions options{third_by_norms(one->config()), 2, false};
  std::vector<std::vector<float>> logits[2];
  SparsityCounts counts[2];
  for (const auto& [gpu, i] : {std::pair{one.get(), 0}, std::pair{two.get(), 1}}) {
    gpu->count_inputs(true);
    gpu->set_sparsity(options);
    logits[i] = one_by_one(*gpu, some_ids(kTokens, gpu->config().n_vocab));
    counts[i] = gpu->sparsity_counts();
  }
  EXPECT_LT(worst_of(logits[0], logits[1]), kSparseBound);
  EXPECT_EQ(counts[0].tokens, counts[1].tokens);
  EXPECT_NEAR(counts[0].share(), counts[1].share(), 1e-3);
  EXPECT_GT(counts[0].share(), 0.3);
  for (size_t l = 0; l < counts[0].layers.size(); ++l)
    for (size_t i = 0; i < kInputs; ++i) EXPECT_EQ(counts[0].layers[l][i].inputs, counts[1].layers[l][i].inputs);
  EXPECT_GT(two->measure_shares().linear, 0);
}

TEST_F(CudaDecoderTest, ShardsThatCannotBeAreRefused) {
  Model narrow(test::fixture("hf/qwen2_heads_of_8"));
  EXPECT_THAT([&] { load(narrow, {.shards = 2}); },
              ThrowsMessage<Error>(HasSubstr("key-value heads can be split over 1 to 1 shards, not 2")));
  const Splittable small(layout::Id::zz4_k);
  EXPECT_THAT([&] { load(*small.model, {.shards = 4}); },
              ThrowsMessage<Error>(HasSubstr("blk.0.attn_k.weight: 256 outputs of zz4_k lie together")));
  EXPECT_THAT([&] { load(*small.model, {.gpu_layers = 1, .shards = 2}); },
              ThrowsMessage<Error>(HasSubstr("leave out --gpu-layers")));
  EXPECT_THAT([&] { load(*small.model, {.shards = 2})->tune(false); },
              ThrowsMessage<Error>(HasSubstr("leave out --gpus")));
}

/// Skips where the machine has one device.
/// The parameter: what LACUNA_EXCHANGE asks for.
class TwoDevices : public test::CudaTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    test::CudaTest::SetUp();
    if (IsSkipped()) return;
    try {
      second_ = std::make_unique<cuda::Device>(cuda::DeviceOptions{.index = 1});
    } catch (const Error& error) {
      GTEST_SKIP() << "SKIPPED: " << error.what();
    }
    if (through_peers() && !(cuda::reaches(device(), *second_) && cuda::reaches(*second_, device())))
      GTEST_SKIP() << "SKIPPED: the devices do not reach each other's memory";
    ::setenv("LACUNA_EXCHANGE", GetParam(), 1);
  }
  void TearDown() override { ::unsetenv("LACUNA_EXCHANGE"); }
  static bool through_peers() { return std::string_view(GetParam()) == "peer"; }
  std::unique_ptr<CudaDecoder> load(Model& model, int64_t devices, const CudaDecoderOptions& options) {
    cuda::Device* const both[] = {&device(), second_.get()};
    return CudaDecoder::load(model.checkpoint, model.pool, std::span(both).first(size_t(devices)), options);
  }

 private:
  std::unique_ptr<cuda::Device> second_;
};

// What is exchanged is added up in the shards' order, and in a fixed order all else is the same launches.
TEST_P(TwoDevices, GiveTheBitsOfTheSameShardsOnOne) {
  for (const SplitCase& c : kSplitCases) {
    const Splittable small(c.id, true, {.group_size = c.group_size});
    Model& model = *small.model;
    for (const int64_t shards : {2, 4}) {
      if (shards == 4 && layout::get(c.id).zigzag) continue;
      SCOPED_TRACE(fmt::format("{} in {} shards", layout::get(c.id).name, shards));
      const auto one = load(model, 1, split_options(shards, true)), two = load(model, 2, split_options(shards, true));
      const auto expected = all_logits(*one);
      for (int round = 0; round < 3; ++round) EXPECT_TRUE(same_bits(all_logits(*two), expected));
      EXPECT_EQ(followed(*two), followed(*one));
      EXPECT_THAT(two->explain(), HasSubstr(fmt::format("{} shards, 2 devices, {}", shards,
                                                        through_peers() ? "peer memory" : "NCCL 2.")));
      EXPECT_EQ(two->weight_bytes(), one->weight_bytes());
    }
  }
}

TEST_P(TwoDevices, GiveTheLogitsOfOneInAnyOrder) {
  for (const SplitCase& c : kSplitCases) {
    SCOPED_TRACE(layout::get(c.id).name);
    const Splittable small(c.id, false, {.group_size = c.group_size});
    Model& model = *small.model;
    const auto one = load(model, 1, split_options(1)), two = load(model, 2, split_options(0));
    EXPECT_LT(worst_of(all_logits(*one), all_logits(*two)), c.limit);
  }
}

TEST_P(TwoDevices, CountTimeAndSample) {
  const Splittable small(layout::Id::zz4_k);
  Model& model = *small.model;
  const auto one = load(model, 1, split_options(2, true)), two = load(model, 2, split_options(2, true));
  for (CudaDecoder* gpu : {one.get(), two.get()}) {
    gpu->count_inputs(true);
    gpu->set_sparsity(SparsityOptions{third_by_norms(gpu->config()), 2, false});
  }
  const std::vector<int32_t> ids = some_ids(kTokens, one->config().n_vocab);
  EXPECT_TRUE(same_bits(one_by_one(*two, ids), one_by_one(*one, ids)));
  EXPECT_EQ(two->sparsity_counts().share(), one->sparsity_counts().share());
  EXPECT_EQ(one->measure_shares().exchange, 0);
  EXPECT_GT(two->measure_shares().exchange, 0);
  SamplerOptions options;
  options.seed = 7;
  std::vector<int32_t> tokens[2];
  for (const auto& [gpu, i] : {std::pair{one.get(), 0}, std::pair{two.get(), 1}}) {
    Sampler sampler(options, gpu->config().n_vocab);
    gpu->truncate(0);
    std::vector<int32_t> next = some_ids(9, gpu->config().n_vocab);
    for (int64_t t = 0; t < 15; ++t) {
      const int32_t id = gpu->next(next, sampler);
      sampler.accept(id);
      tokens[i].push_back(id);
      next = {id};
    }
  }
  EXPECT_EQ(tokens[0], tokens[1]);
}

INSTANTIATE_TEST_SUITE_P(Exchanges, TwoDevices, testing::Values("peer", "nccl"),
                         [](const auto& of) { return std::string(of.param); });

TEST_F(CudaDecoderTest, ErrorsSayWhatDoesNotRun) {
  Model opt(test::fixture("hf/opt"));
  EXPECT_THAT([&] { load(opt); }, ThrowsMessage<Error>(HasSubstr("learned positions do not run on CUDA yet")));
  for (const char* name : {"llama_head_dim", "llama_bias", "llama_tied", "mistral_sliding_window", "qwen2"}) {
    SCOPED_TRACE(name);  // heads of 4, 6 and 10 values
    Model narrow(test::fixture(std::string("hf/") + name));
    EXPECT_THAT([&] { load(narrow); }, ThrowsMessage<Error>(HasSubstr("a multiple of 8")));
  }
  Model model(test::fixture("hf/llama_mha"));
  const auto gpu = load(model);
  const int32_t none = -1;
  EXPECT_THAT([&] { gpu->forward({&none, 1}); }, ThrowsMessage<Error>(HasSubstr("outside the model's vocabulary")));
  EXPECT_THAT([&] { gpu->follow(1, kTokens + 1); }, ThrowsMessage<Error>(HasSubstr("do not fit")));
  cuda::Device small({.index = 0, .memory_limit = int64_t{1} << 20});
  CudaDecoderOptions options;
  options.context = kTokens;
  options.progress = false;
  EXPECT_THAT([&] { CudaDecoder::load(model.checkpoint, model.pool, small, options); },
              ThrowsMessage<Error>(HasSubstr("of weights")));
}

}  // namespace
}  // namespace lacuna::model
