// tests/host_device/decoder_test.cc - layers split over shards and devices, with the host in the place of the cards:
// which weights and values go where. What kernels compute is tested elsewhere.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "host_device/clock.h"
#include "host_device/nccl/nccl.h"
#include "host_device/peers.h"
#include "host_device/products.h"
#include "host_device/tape.h"
#include "loaded_model.h"
#include "model/cuda_decoder.h"
#include "model/synth.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

using layout::Id;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Logits = std::vector<std::vector<float>>;

constexpr int64_t kTokens = 24;

/// Random weights: two superblocks of keys, three of feed-forward values, a vocabulary that is a multiple of nothing.
struct Small {
  explicit Small(Id id, bool biases, double weight_sparsity = 0) {
    const bool tied = biases || id != Id::f32;
    const ModelShape shape = {
        "small", biases ? "qwen2" : "llama", 2, 256, 8, 4, 128, 768, 301, 64, 1e-5, 10000, 1, tied, biases};
    const std::string path = (folder.path() / "small.gguf").string();
    ThreadPool pool(2);
    const layout::Params params = {.group_size = layout::get(id).family == layout::Family::group_sparse ? 16 : 0};
    synthesize(
        shape, path,
        {.layout = id, .head_layout = Id::f32, .params = params, .weight_sparsity = weight_sparsity, .progress = false},
        pool);
    model = std::make_unique<test::LoadedModel>(path);
  }
  test::TempDir folder;
  std::unique_ptr<test::LoadedModel> model;
};

std::vector<int32_t> some_ids(int64_t count, int64_t n_vocab) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < count; ++t) ids.push_back(int32_t((t * 7919 + 13) % n_vocab));
  return ids;
}

double worst_of(const Logits& expected, const Logits& found) {
  EXPECT_EQ(expected.size(), found.size());
  double worst = 0;
  for (size_t t = 0; t < expected.size(); ++t) {
    double error = 0, norm = 0;
    for (size_t v = 0; v < expected[t].size(); ++v) {
      const double d = double(found[t][v]) - double(expected[t][v]);
      error += d * d;
      norm += double(expected[t][v]) * double(expected[t][v]);
    }
    const double relative = std::sqrt(error / norm);
    if (std::isnan(relative)) return relative;
    worst = std::max(worst, relative);
  }
  return worst;
}

bool same_bits(const Logits& a, const Logits& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return std::ranges::equal(
        x, y, [](float u, float v) { return std::bit_cast<uint32_t>(u) == std::bit_cast<uint32_t>(v); });
  });
}

/// A batch's last token and single ones after it, then a batch that is scored.
Logits all_logits(CudaDecoder& gpu) {
  const std::vector<int32_t> ids = some_ids(kTokens, gpu.config().n_vocab);
  const auto n_vocab = size_t(gpu.config().n_vocab);
  Logits out;
  const auto take = [&](std::span<const float> logits) { out.emplace_back(logits.begin(), logits.end()); };
  gpu.truncate(0);
  take(gpu.forward(std::span(ids).first(10)));
  for (size_t t = 10; t < 16; ++t) take(gpu.forward({&ids[t], 1}));
  gpu.truncate(0);
  gpu.score(ids, [&](int64_t, int64_t count, const float* logits) {
    for (size_t t = 0; t < size_t(count); ++t) take({logits + t * n_vocab, n_vocab});
  });
  return out;
}

Logits of_the_cpu(Decoder& cpu) {
  const std::vector<int32_t> ids = some_ids(kTokens, cpu.config().n_vocab);
  Session session(cpu, kTokens);
  Logits each, out;
  for (const int32_t id : ids) {
    const std::span<const float> logits = cpu.forward(session, {&id, 1});
    each.emplace_back(logits.begin(), logits.end());
  }
  out.assign(each.begin() + 9, each.begin() + 16);
  out.insert(out.end(), each.begin(), each.end());
  return out;
}

Logits one_by_one(CudaDecoder& gpu) {
  Logits out;
  gpu.truncate(0);
  for (const int32_t id : some_ids(kTokens, gpu.config().n_vocab)) {
    const std::span<const float> logits = gpu.forward({&id, 1});
    out.emplace_back(logits.begin(), logits.end());
  }
  return out;
}

/// Leaves a third of all inputs out, whatever they are.
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

class HostDecoder : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("LACUNA_NCCL", LACUNA_FAKE_NCCL, 1);
    void* const library = ::dlopen(LACUNA_FAKE_NCCL "/libnccl.so.2", RTLD_NOW);
    ASSERT_NE(library, nullptr) << ::dlerror();
    fake_ = reinterpret_cast<FakeNccl* (*)()>(::dlsym(library, "fake_nccl"))();
    fake_->failing_rank = fake_->refused_rank = -1;
    fake_->enqueue = [](std::function<void()> work) {
      if (test::tape() != nullptr)
        test::tape()->push_back(std::move(work));
      else
        work();
    };
  }
  void TearDown() override {
    ::unsetenv("LACUNA_NCCL");
    test::peers() = {};
    test::clock() = {};
  }

  std::unique_ptr<CudaDecoder> load(test::LoadedModel& model, int64_t devices, int64_t shards,
                                    bool deterministic = false, cuda::Plans plans = {}) {
    CudaDecoderOptions options;
    options.plans = std::move(plans);
    options.shards = shards;
    options.deterministic = deterministic;
    return load(model, std::move(options), devices);
  }
  std::unique_ptr<CudaDecoder> load(test::LoadedModel& model, CudaDecoderOptions options, int64_t devices = 1) {
    options.context = kTokens;
    options.progress = false;
    cuda::Device* const all[] = {&first_, &second_};
    return CudaDecoder::load(model.checkpoint, model.pool, std::span(all).first(size_t(devices)), options);
  }

  FakeNccl* fake_ = nullptr;
  cuda::Device first_{{.index = 0}}, second_{{.index = 1}};
};

// Sums are double here and rounded once; shards add one rounding for each half block, and f16 of the cache may then be
// the neighbour. The CPU rounds a token's inputs to 15 bits where weights are zz8.
TEST_F(HostDecoder, ShardsGiveTheLogitsOfTheWhole) {
  for (const Id id : {Id::f32, Id::zz8}) {
    for (const bool biases : {false, true}) {
      const Small small(id, biases);
      const Logits expected = of_the_cpu(*small.model->decoder);
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, biases {}, fixed order {}", layout::get(id).name, biases, deterministic));
        const auto whole = load(*small.model, 1, 0, deterministic);
        const Logits unsplit = all_logits(*whole);
        EXPECT_LT(worst_of(expected, unsplit), id == Id::f32 ? 2e-3 : 0.02);
        for (const int64_t shards : {2, 4}) {
          if (shards == 4 && id == Id::zz8) continue;
          const auto one = load(*small.model, 1, shards, deterministic);
          const auto two = load(*small.model, 2, shards, deterministic);
          const Logits split = all_logits(*one);
          EXPECT_LT(worst_of(unsplit, split), 2e-3) << shards;
          EXPECT_TRUE(same_bits(all_logits(*two), split)) << shards;
          EXPECT_TRUE(same_bits(all_logits(*two), split)) << shards << " again";
          EXPECT_THAT(two->explain(), HasSubstr(fmt::format("{} shards, 2 devices, NCCL 2.28.3", shards)));
          EXPECT_EQ(two->weight_bytes(), whole->weight_bytes());
        }
      }
    }
  }
}

// Groups that are larger than the work space for their weights, with slices that begin within a part.
TEST_F(HostDecoder, SlicesOfAGroupGiveTheSameBits) {
  for (const Id id : {Id::f32, Id::zz8}) {
    for (const bool biases : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, biases {}", layout::get(id).name, biases));
      const Small small(id, biases);
      test::products() = {};
      const Logits whole = all_logits(*load(*small.model, {.batch_weight_bytes = int64_t{192} << 20}));
      const test::Products of_whole = test::products();
      EXPECT_EQ(of_whole.most_outputs, 2048);  // q, k and v
      // 256 outputs of the widest input, 1024 values: 1024 outputs of the 256 that most groups read.
      const int64_t least = cuda::operand_bytes(256, 1024);
      for (const auto& [bytes, outputs] : {std::pair{int64_t{0}, 1024}, {least, 1024}, {least + least / 4, 1280}}) {
        test::products() = {};
        const Logits sliced = all_logits(*load(*small.model, {.batch_weight_bytes = bytes}));
        EXPECT_TRUE(same_bits(sliced, whole)) << bytes;
        EXPECT_EQ(test::products().most_outputs, outputs) << bytes;
        EXPECT_GT(test::products().count, of_whole.count) << bytes;
      }
    }
  }
}

TEST_F(HostDecoder, PeersGiveTheSameBits) {
  const Small small(Id::zz8, false);
  const auto one = load(*small.model, 1, 2);
  test::peers().reach = true;
  const auto two = load(*small.model, 2, 2);
  EXPECT_TRUE(same_bits(all_logits(*two), all_logits(*one)));
  EXPECT_THAT(two->explain(), HasSubstr("2 shards, 2 devices, peer memory and NCCL 2.28.3"));
  EXPECT_GT(test::peers().launches, 0);
  EXPECT_EQ(fake_->alive, 0);  // nothing here is large
}

TEST_F(HostDecoder, ShardsFollowAndSampleTheSameTokens) {
  const Small small(Id::zz8, true);
  std::vector<std::vector<int32_t>> tokens;
  for (const auto& [devices, shards] : {std::pair{1, 1}, {1, 2}, {2, 2}}) {
    const auto gpu = load(*small.model, devices, shards);
    const std::vector<int32_t> ids = some_ids(9, gpu->config().n_vocab);
    std::vector<int32_t>& of = tokens.emplace_back();
    gpu->append(ids);
    gpu->follow(5, 8);
    gpu->wait();
    EXPECT_EQ(gpu->length(), 17);
    const int32_t next = 7;
    const std::span<const float> logits = gpu->forward({&next, 1});
    of.push_back(int32_t(std::ranges::max_element(logits) - logits.begin()));
    SamplerOptions options;
    options.seed = 3;
    Sampler sampler(options, gpu->config().n_vocab);
    for (int64_t t = 0; t < 4; ++t) {
      of.push_back(gpu->next({&of.back(), 1}, sampler));
      sampler.accept(of.back());
    }
  }
  EXPECT_EQ(tokens[0], tokens[1]);
  EXPECT_EQ(tokens[0], tokens[2]);
}

TEST_F(HostDecoder, ShardsLeaveOutTheSameInputs) {
  const Small small(Id::zz8, false);
  std::vector<Logits> logits;
  std::vector<SparsityCounts> counts;
  for (const auto& [devices, shards] : {std::pair{1, 1}, {1, 2}, {2, 2}}) {
    const auto gpu = load(*small.model, devices, shards);
    for (const bool counted : {false, true}) {  // with counts the gate has a launch of its own
      gpu->count_inputs(counted);
      gpu->set_sparsity(SparsityOptions{third_by_norms(gpu->config()), 2, false});
      logits.push_back(one_by_one(*gpu));
    }
    counts.push_back(gpu->sparsity_counts());
    gpu->truncate(8);
    const CudaShares shares = gpu->measure_shares();
    EXPECT_EQ(shares.exchange > 0, devices > 1);
  }
  for (const Logits& found : logits) EXPECT_LT(worst_of(logits[0], found), 2e-3);
  for (const SparsityCounts& found : counts) {
    EXPECT_EQ(found.tokens, kTokens - 2);
    EXPECT_NEAR(found.share(), 1.0 / 3, 0.01);
    for (size_t l = 0; l < found.layers.size(); ++l)
      for (size_t i = 0; i < kInputs; ++i) {
        EXPECT_EQ(found.layers[l][i].inactive, counts[0].layers[l][i].inactive);
        EXPECT_EQ(found.layers[l][i].inputs, counts[0].layers[l][i].inputs);
      }
  }
}

// A batch's tokens leave out what they leave out alone, each shard its own inputs; what is counted is the same.
TEST_F(HostDecoder, BatchesLeaveOutWhatSingleTokensDo) {
  const Small small(Id::zz8, false);
  const SparsityOptions alone{third_by_norms(small.model->decoder->config()), 3, false};
  SparsityOptions together = alone;
  together.mask_batches = true;
  for (const auto& [devices, shards] : {std::pair{1, 1}, {1, 2}, {2, 2}}) {
    const auto gpu = load(*small.model, devices, shards);
    gpu->count_inputs(true);
    const Logits dense = all_logits(*gpu);
    gpu->set_sparsity(alone);
    const Logits expected = one_by_one(*gpu);
    const SparsityCounts counts = gpu->sparsity_counts();
    gpu->set_sparsity(together);
    gpu->truncate(0);
    Logits found;
    const auto n_vocab = size_t(gpu->config().n_vocab);
    const auto sink = [&](int64_t, int64_t count, const float* logits) {
      for (size_t t = 0; t < size_t(count); ++t) found.emplace_back(logits + t * n_vocab, logits + (t + 1) * n_vocab);
    };
    const std::vector<int32_t> ids = some_ids(kTokens, gpu->config().n_vocab);
    gpu->score(std::span(ids).first(2), sink);  // one by one, both dense
    gpu->score(std::span(ids).subspan(2), sink);
    EXPECT_LT(worst_of(expected, found), 2e-3);
    EXPECT_GT(worst_of(Logits(dense.end() - kTokens, dense.end()), found), 0.05);
    const SparsityCounts batch = gpu->sparsity_counts();
    EXPECT_EQ(batch.tokens, kTokens - 3);
    EXPECT_EQ(batch.tokens, counts.tokens);
    for (size_t l = 0; l < counts.layers.size(); ++l)
      for (size_t i = 0; i < kInputs; ++i) EXPECT_EQ(batch.layers[l][i].inactive, counts.layers[l][i].inactive);
    // A prompt, then single tokens; counted and not.
    for (const bool counted : {true, false}) {
      gpu->count_inputs(counted);
      for (const int64_t prompt : {int64_t{10}, kTokens - 1}) {
        gpu->truncate(0);
        std::span<const float> last = gpu->forward(std::span(ids).first(size_t(prompt)));
        EXPECT_LT(worst_of({expected[size_t(prompt - 1)]}, {{last.begin(), last.end()}}), 2e-3);
        gpu->append(std::span(ids).subspan(size_t(prompt), size_t(kTokens - 1 - prompt)));
        last = gpu->forward(std::span(ids).last(1));
        EXPECT_LT(worst_of({expected.back()}, {{last.begin(), last.end()}}), 2e-3);
      }
      EXPECT_EQ(gpu->sparsity_counts().tokens, counted ? 2 * (kTokens - 3) : 0);
    }
    gpu->set_sparsity(std::nullopt);
    EXPECT_LT(worst_of(dense, all_logits(*gpu)), 1e-6);
  }
}

// Layers on the CPU take tokens that leave inputs out one by one, and so does the device then.
TEST_F(HostDecoder, BatchesWithLayersOnTheCpuRunOneByOne) {
  const Small small(Id::zz8, false);
  CudaDecoderOptions options;
  options.gpu_layers = 1;
  const auto gpu = load(*small.model, options);
  gpu->count_inputs(true);
  std::vector<Logits> logits(2);
  for (const bool together : {false, true}) {
    gpu->set_sparsity(SparsityOptions{third_by_norms(gpu->config()), 3, together});
    gpu->truncate(0);
    const auto n_vocab = size_t(gpu->config().n_vocab);
    gpu->score(some_ids(kTokens, gpu->config().n_vocab), [&](int64_t, int64_t count, const float* found) {
      EXPECT_EQ(count, 1);
      logits[together].emplace_back(found, found + n_vocab);
    });
    const SparsityCounts counts = gpu->sparsity_counts();
    EXPECT_EQ(counts.layers.size(), 2u);
    EXPECT_EQ(counts.tokens, kTokens - 3);
    EXPECT_NEAR(counts.share(), 1.0 / 3, 0.01);
  }
  EXPECT_LT(worst_of(logits[0], logits[1]), 1e-3);
}

// No call waits for a device whose partner has failed, then or later.
TEST_F(HostDecoder, AnExchangeThatFailsIsTheEndOfTheDecoder) {
  const Small small(Id::f32, false);
  const auto gpu = load(*small.model, 2, 2);
  const int32_t id = 1;
  gpu->forward({&id, 1});
  fake_->failing_rank = 1;
  EXPECT_THAT(
      [&] {
        gpu->forward({&id, 1});
      },
      ThrowsMessage<Error>(HasSubstr("NCCL: an exchange failed: remote error")));
  fake_->failing_rank = -1;
  for (int time = 0; time < 2; ++time) {
    EXPECT_THAT([&] { gpu->forward({&id, 1}); }, ThrowsMessage<Error>(HasSubstr("has lost its devices")));
    EXPECT_THAT([&] { gpu->follow(1, 2); }, ThrowsMessage<Error>(HasSubstr("has lost its devices")));
  }
}

/// The lines of explain() that have the words.
std::vector<std::string> lines_of(const CudaDecoder& gpu, const std::string& words) {
  std::vector<std::string> out;
  std::istringstream all(gpu.explain());
  for (std::string line; std::getline(all, line);)
    if (line.find(words) != line.npos) out.push_back(line);
  return out;
}

TEST_F(HostDecoder, TakesStoredPlansOfGroupSparseProducts) {
  for (const Id id : {Id::gs4, Id::gs8}) {  // units and chunks
    SCOPED_TRACE(layout::get(id).name);
    const Small small(id, true, 0.5);
    const cuda::GroupsProduct down{id, 1, 768, 16, 50};
    cuda::GroupsPlan plan = cuda::groups_plans(layout::get(id), down.are_units()).back();
    plan.blocks = 5, plan.early = 2;
    cuda::Plans plans;
    plans.set(down, plan);
    const auto found = [&](const cuda::Plans& given, bool deterministic, int64_t shards = 0) {
      return lines_of(*load(*small.model, 1, shards, deterministic, given), cuda::describe(plan));
    };
    EXPECT_THAT(found(plans, false), testing::ElementsAre(testing::StartsWith("ffn_down: ")));
    EXPECT_THAT(found(plans, true), testing::IsEmpty()) << "in a fixed order: the default plan";
    EXPECT_THAT(found({}, false), testing::IsEmpty());
    cuda::Plans others;
    const std::vector<cuda::GroupsProduct> products = {
        {id, 1, 768, 32, 50}, {id, 2, 768, 16, 50}, {id, 1, 1024, 16, 55}, {Id::gs2, 1, 768, 16, 50}};
    for (const cuda::GroupsProduct& other : products) others.set(other, plan);
    EXPECT_THAT(found(others, false), testing::ElementsAre(testing::StartsWith("attn_output: ")));
    // Of weights that keep more: as many blocks as there are chunks for, where they are shared out in any number.
    plan.blocks = 1 << 20;
    cuda::Plans more;
    more.set(cuda::GroupsProduct{id, 1, 768, 16, 95}, plan);
    const auto fitted = lines_of(*load(*small.model, 1, 0, false, more), "ffn_down: ");
    ASSERT_EQ(fitted.size(), 1u);
    EXPECT_THAT(fitted[0], HasSubstr(", 2 early"));
    EXPECT_THAT(fitted[0], testing::Not(HasSubstr("1048576 blocks")));
  }
}

// The clock favours, of each product, one plan; what is found is stored, and serves the next decoder.
TEST_F(HostDecoder, FindsTheFastestPlansOfGroupSparseProducts) {
  for (const Id id : {Id::gs4, Id::gs8}) {
    SCOPED_TRACE(layout::get(id).name);
    const Small small(id, false, 0.5);
    const bool units = cuda::GroupsProduct{id, 1, 256, 16}.are_units();
    const auto kernels = cuda::groups_plans(layout::get(id), units);
    const auto wanted = [&](const cuda::Groups& weights) {
      cuda::GroupsPlan plan = kernels[size_t(weights.panels) % kernels.size()];
      plan.split = weights.K == 768 ? cuda::Split::slice : cuda::Split::stream;
      plan.early = weights.panels == 6 ? 8 : 0;
      return plan;
    };
    test::clock().of_groups = [&](const cuda::GroupsPlan& plan, const cuda::Groups& weights) {
      const cuda::GroupsPlan best = wanted(weights);
      return 1.0 + (plan.warps != best.warps || plan.resident != best.resident) + (plan.split != best.split) +
             0.1 * (plan.early != best.early) + 1e-2 * plan.blocks;
    };
    const auto gpu = load(*small.model, 1, 0);
    const std::vector<CudaGroupsTuning> tuned = gpu->tune_groups(false);
    ASSERT_EQ(tuned.size(), 4u) << "q+k+v, output, gate+up, down";
    cuda::Plans plans;
    for (const CudaGroupsTuning& tuning : tuned) {
      SCOPED_TRACE(describe(tuning.product) + ": " + describe(tuning.plan));
      EXPECT_EQ(tuning.product.layout, id);
      EXPECT_EQ(tuning.product.group, 16);
      EXPECT_EQ(tuning.product.kept, 50);
      EXPECT_NO_THROW(cuda::check_plan(tuning.product, tuning.plan));
      EXPECT_LE(tuning.tuned_ms, tuning.standard_ms);
      cuda::Groups of;
      of.panels = tuning.product.rows, of.K = tuning.product.K;
      const cuda::GroupsPlan best = wanted(of);
      EXPECT_EQ(tuning.plan.warps, best.warps);
      EXPECT_EQ(tuning.plan.resident, best.resident);
      EXPECT_EQ(tuning.plan.split, best.split);
      EXPECT_EQ(tuning.plan.early, best.early);
      plans.set(tuning.product, tuning.plan);
    }
    EXPECT_EQ(load(*small.model, 1, 0, false, plans)->explain(), gpu->explain());
    EXPECT_NE(load(*small.model, 1, 0)->explain(), gpu->explain());
    EXPECT_TRUE(gpu->tune(false).empty()) << "no zigzag weights";
    EXPECT_THAT([&] { load(*small.model, 1, 0, true)->tune_groups(false); },
                ThrowsMessage<Error>(HasSubstr("leave out --deterministic")));
  }
}

TEST_F(HostDecoder, ErrorsSayWhatCannotBe) {
  const Small small(Id::zz8, false);
  EXPECT_THAT([&] { load(*small.model, 2, 3); },
              ThrowsMessage<Error>(HasSubstr("3 shards cannot be shared out over 2 devices; ask for a multiple of 2")));
  EXPECT_THAT([&] { load(*small.model, 1, 4); },
              ThrowsMessage<Error>(HasSubstr("blk.0.attn_k.weight: 256 outputs of zz8 lie together, so that 4 "
                                             "key-value heads can be split over 1 to 2 shards, not 4")));
  EXPECT_THAT([&] { load(*small.model, 1, 2)->tune(false); }, ThrowsMessage<Error>(HasSubstr("leave out --gpus")));
}

}  // namespace
}  // namespace lacuna::model
