// Activation sparsity: which inputs count, how thresholds are stored, and that decoding token by token leaves out what
// masking a batch does.
#include "model/sparsity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/rng.h"
#include "io/gguf_metadata.h"
#include "kernels/active.h"
#include "model/decoder.h"
#include "model/support.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

std::vector<int32_t> active_of(const std::vector<float>& x, float t, const std::vector<float>& norms = {}) {
  std::vector<int32_t> active(x.size());
  ThreadPool pool(1);
  active.resize(size_t(kernels::collect_active(pool, x.data(), 1, int64_t(x.size()),
                                               norms.empty() ? nullptr : norms.data(), t, active.data())));
  return active;
}

TEST(Active, EqualityNanAndInfinityStay) {
  EXPECT_THAT(active_of({0.5f, -0.5f, 0.49f, -0.49f, kNan, kInf, -kInf, 0.0f, -0.0f}, 0.5f),
              ElementsAre(0, 1, 4, 5, 6));
  EXPECT_THAT(active_of({0.0f, -0.0f, 1e-40f, kNan}, 0.0f), ElementsAre(0, 1, 2, 3)) << "t = 0 leaves nothing out";
  EXPECT_THAT(active_of({4560, -4560, 1}, 4560), ElementsAre(0, 1));
}

TEST(Active, WinaScalesByTheColumn) {
  EXPECT_THAT(active_of({1, 1, 1, kNan, kInf}, 2, {1, 2, 3, 0, 0}), ElementsAre(1, 2, 3, 4));
}

TEST(Active, EveryCountInOrder) {
  constexpr int64_t K = 257;
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{17}, K - 1, K}) {
    std::vector<float> x(size_t(K), 0.1f);
    for (int64_t i = 0; i < count; ++i) x[size_t(i * 131 % K)] = i % 2 ? 2.0f : -2.0f;  // 131 is prime to K
    const std::vector<int32_t> active = active_of(x, 1);
    ASSERT_EQ(int64_t(active.size()), count);
    for (size_t i = 1; i < active.size(); ++i) EXPECT_LT(active[i - 1], active[i]);
    for (const int32_t k : active) EXPECT_EQ(std::abs(x[size_t(k)]), 2.0f);
    std::vector<float> masked(static_cast<size_t>(K));
    EXPECT_EQ(mask_inactive(x.data(), nullptr, 1, K, masked.data()), K - count);
    for (int64_t k = 0; k < K; ++k) EXPECT_EQ(masked[size_t(k)], std::abs(x[size_t(k)]) < 1 ? 0.0f : x[size_t(k)]);
  }
}

ThresholdSet some_set() {
  ThresholdSet set;
  set.widths = {2, 3, 2, 4};
  set.n_layers = 2;
  set.levels = {0.25, 0.4};
  set.text_sha256 = "ab";
  set.tokens = 100;
  set.ctx = 32;
  set.skipped = 4;
  float next = 0.125f;
  for (const Mode mode : {Mode::uniform, Mode::greedy}) {
    for (const Criterion criterion : {Criterion::magnitude, Criterion::wina}) {
      ThresholdSet::Entry entry{mode, criterion, {}, {}};
      for (int level = 0; level < 2; ++level) {
        PerInput t(2), realised(2);
        for (int layer = 0; layer < 2; ++layer)
          for (size_t i = 0; i < size_t(kInputs); ++i)
            t[size_t(layer)][i] = next += 0.25f, realised[size_t(layer)][i] = next / 64;
        entry.t.push_back(t);
        entry.realised.push_back(realised);
      }
      set.entries.push_back(entry);
    }
  }
  set.norms.resize(2);
  for (auto& layer : set.norms)
    for (size_t i = 0; i < size_t(kInputs); ++i) layer[i].assign(size_t(set.widths[i]), next += 1);
  return set;
}

TEST(ThresholdSet, SurvivesAFile) {
  const test::TempDir dir;
  const ThresholdSet set = some_set();
  io::Metadata metadata;
  metadata.set("lacuna.threshold.layered.wina", std::vector<float>{1});  // of an older calibration
  set.write(metadata);
  io::write_gguf_metadata(dir.file("t.gguf"), metadata);
  const auto back = ThresholdSet::read(io::read_gguf_metadata(dir.file("t.gguf")), "t.gguf");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->stored(),
            "uniform magnitude 25%, 40%; uniform wina 25%, 40%; greedy magnitude 25%, 40%; greedy wina 25%, 40%");
  EXPECT_EQ(back->widths, set.widths);
  EXPECT_EQ(back->norms, set.norms);
  EXPECT_EQ(back->text_sha256, "ab");
  EXPECT_EQ(back->tokens, 100);
  EXPECT_EQ(back->skipped, 4);
  for (size_t e = 0; e < set.entries.size(); ++e) {
    EXPECT_EQ(back->entries[e].t, set.entries[e].t);
    EXPECT_EQ(back->entries[e].realised, set.entries[e].realised);
  }
  EXPECT_FALSE(ThresholdSet::read(io::Metadata{}, "x"));
}

TEST(ThresholdSet, GroupsSurviveAFileAndSingleInputsWriteNone) {
  ThresholdSet set = some_set();
  io::Metadata metadata;
  set.write(metadata);
  EXPECT_FALSE(metadata.contains("lacuna.threshold.group"));
  EXPECT_EQ(ThresholdSet::read(metadata, "m")->group, 1);
  set.group = 16;
  set.write(metadata);
  const auto back = ThresholdSet::read(metadata, "m");
  EXPECT_EQ(back->group, 16);
  EXPECT_EQ(back->select(0.4, std::nullopt, Criterion::magnitude, "m").group, 16);
}

TEST(MaskInactive, LeavesOutWholeGroups) {
  const std::vector<float> x = {2, 0.1f, 0.1f, 0.1f, 0.5f, 0.5f, 0.5f, 0.5f, 3, 0};
  std::vector<float> masked(x.size());
  EXPECT_EQ(mask_inactive(x.data(), nullptr, 1, int64_t(x.size()), masked.data(), 4), 4);
  EXPECT_THAT(masked, ElementsAre(2, 0.1f, 0.1f, 0.1f, 0, 0, 0, 0, 3, 0));
}

TEST(ThresholdSet, SelectsTheBestModeAndNamesWhatIsStored) {
  const ThresholdSet set = some_set();
  const Thresholds best = set.select(0.4, std::nullopt, Criterion::magnitude, "m.gguf");
  EXPECT_EQ(best.mode, Mode::greedy);
  EXPECT_EQ(best.t, set.entries[2].t[1]);
  EXPECT_TRUE(best.norms.empty());
  EXPECT_EQ(set.select(0.25, Mode::uniform, Criterion::wina, "m.gguf").norms, set.norms);
  EXPECT_THAT(
      [&] { set.select(0.3, std::nullopt, Criterion::magnitude, "m.gguf"); },
      ThrowsMessage<Error>(AllOf(HasSubstr("m.gguf"), HasSubstr("30%"), HasSubstr("greedy magnitude 25%, 40%"))));
  EXPECT_THAT([&] { set.select(0.4, Mode::layered, Criterion::magnitude, "m.gguf"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("mode layered"), HasSubstr("uniform wina"))));
}

TEST(ThresholdSet, DamagedFilesAreErrors) {
  const auto refused = [](const char* key, io::MetadataValue value, const char* message) {
    io::Metadata metadata;
    some_set().write(metadata);
    metadata.set(key, std::move(value));
    EXPECT_THAT([&] { ThresholdSet::read(metadata, "t.gguf"); }, ThrowsMessage<Error>(HasSubstr(message))) << key;
  };
  refused("lacuna.threshold.version", uint32_t{2}, "version 2");
  refused("lacuna.threshold.layers", uint32_t{3}, "has 16 values, expected 24");
  refused("lacuna.threshold.widths", std::vector<uint32_t>{1, 2}, "widths");
  refused("lacuna.threshold.levels", std::vector<float>{0.4f, 0.25f}, "ascend");
  refused("lacuna.threshold.greedy.wina", std::vector<float>(16, kNan), "nan");
  refused("lacuna.threshold.greedy.wina", std::vector<float>(16, -1.0f), "-1");
  refused("lacuna.threshold.wina.norms", std::vector<float>(5, 1), "has 5 values, expected 22");
}

// ---- in a decoder ----

/// The median size of every input or group of inputs, from a dense run.
Thresholds medians(Decoder& decoder, std::span<const int32_t> ids, int64_t group = 1) {
  Thresholds out;
  out.level = 0.5;
  out.group = group;
  out.t.resize(size_t(decoder.config().n_layers));
  decoder.set_observer([&](int64_t layer, Input input, const float* x, int64_t M, int64_t K, int64_t) {
    std::vector<float> sizes;
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; k += group)
        sizes.push_back(kernels::group_size(x + m * K + k, nullptr, std::min(group, K - k)));
    std::nth_element(sizes.begin(), sizes.begin() + int64_t(sizes.size() / 2), sizes.end());
    out.t[size_t(layer)][size_t(input)] = sizes[sizes.size() / 2];
  });
  Session session(decoder, int64_t(ids.size()));
  decoder.forward(session, ids, Decoder::Want::layers, {});
  decoder.set_observer({});
  return out;
}

std::vector<int32_t> some_ids(int64_t count, int64_t n_vocab) {
  Rng rng(7);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = int32_t(rng.below(uint64_t(n_vocab)));
  return ids;
}

// f32 weights: batches and single tokens differ by the order of float sums alone (K * 2^-24 relative, K <= 64), unless
// an input lies that close to its threshold.
TEST(SparseDecoder, MaskedBatchEqualsTokenByTokenWithActiveLists) {
  for (const char* path : {"text_model", "hf/qwen3", "hf/opt", "hf/opt_post_norm_projected"}) {
    Model model(test::fixture(path));
    Decoder& decoder = *model.decoder;
    const int64_t n = std::min<int64_t>(decoder.config().n_ctx, 48), V = decoder.config().n_vocab;
    const std::vector<int32_t> ids = some_ids(n, V);
    for (const auto& [prefix, group] : {std::pair<int64_t, int64_t>{0, 1}, {4, 1}, {4, 8}}) {
      const Thresholds thresholds = medians(decoder, ids, group);
      std::vector<float> batch(size_t(n * V));
      decoder.set_sparsity(SparsityOptions{thresholds, prefix, true});
      Session together(decoder, n, kernels::KvType::f32), single(decoder, n, kernels::KvType::f32);
      decoder.forward(together, ids, Decoder::Want::all, [&](int64_t first, int64_t count, const float* logits) {
        std::copy_n(logits, count * V, batch.data() + first * V);
      });
      const SparsityCounts masked = decoder.sparsity_counts();
      EXPECT_EQ(masked.tokens, n - prefix);
      EXPECT_NEAR(masked.share(), 0.5, 0.15) << path;
      decoder.set_sparsity(SparsityOptions{thresholds, prefix, false});
      double error = 0, norm = 0;
      for (int64_t m = 0; m < n; ++m) {
        const std::span<const float> logits = decoder.forward(single, std::span(ids).subspan(size_t(m), 1));
        for (int64_t v = 0; v < V; ++v) {
          const double e = batch[size_t(m * V + v)], d = logits[size_t(v)] - e;
          error += d * d;
          norm += e * e;
        }
      }
      EXPECT_LT(std::sqrt(error / norm), 1e-4) << path << ' ' << prefix << ' ' << group;
      EXPECT_NEAR(decoder.sparsity_counts().share(), masked.share(), 1e-3) << path;
    }
  }
}

TEST(SparseDecoder, SeveralTokensRunDenseUnlessMasked) {
  Model model(test::fixture("text_model"));
  Decoder& decoder = *model.decoder;
  const std::vector<int32_t> ids = some_ids(24, decoder.config().n_vocab);
  const auto logits = [&] {
    Session session(decoder, 24);
    const auto view = decoder.forward(session, ids);
    return std::vector<float>(view.begin(), view.end());
  };
  const std::vector<float> dense = logits();
  const Thresholds thresholds = medians(decoder, ids);
  decoder.set_sparsity(SparsityOptions{thresholds, 4, false});
  EXPECT_EQ(logits(), dense);
  EXPECT_EQ(decoder.sparsity_counts().tokens, 0);
  decoder.set_sparsity(SparsityOptions{thresholds, 4, true});
  EXPECT_NE(logits(), dense);
  Thresholds nothing = thresholds;
  for (auto& layer : nothing.t) layer = {};
  decoder.set_sparsity(SparsityOptions{nothing, 0, true});
  EXPECT_EQ(logits(), dense) << "thresholds of zero change nothing";
  EXPECT_EQ(decoder.sparsity_counts().share(), 0);
  decoder.set_sparsity(std::nullopt);
  EXPECT_EQ(logits(), dense);
  nothing.t.pop_back();
  EXPECT_THROW(decoder.set_sparsity(SparsityOptions{nothing, 0, true}), Error);
}

}  // namespace
}  // namespace lacuna::model
