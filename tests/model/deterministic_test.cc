// LoadOptions::deterministic: logits do not depend on the number of threads, to the last bit.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "io/quantize.h"
#include "model/decoder.h"
#include "model/sparsity.h"
#include "test_support.h"

namespace lacuna::model {
namespace {

/// Logits of a prompt of 40 tokens and of six more, one by one.
std::vector<float> logits_of(const std::string& path, int threads, bool sparse) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  ThreadPool pool(threads);
  const auto decoder = Decoder::load(checkpoint, pool, {.progress = false, .deterministic = true});
  const Config& config = decoder->config();
  if (sparse) {
    Thresholds thresholds;
    thresholds.t.resize(size_t(config.n_layers), {0.3f, 0.05f, 0.3f, 0.02f});
    thresholds.realised.resize(size_t(config.n_layers), {0.5f, 0.5f, 0.5f, 0.5f});
    decoder->set_sparsity(SparsityOptions{thresholds, 0, false});
  }
  std::vector<int32_t> ids;
  for (int i = 0; i < 46; ++i) ids.push_back(int32_t((i * 37 + 11) % config.n_vocab));
  Session session(*decoder, 46);
  std::vector<float> out;
  const auto keep = [&](std::span<const float> logits) { out.insert(out.end(), logits.begin(), logits.end()); };
  keep(decoder->forward(session, std::span(ids).first(40)));
  for (size_t i = 40; i < ids.size(); ++i) keep(decoder->forward(session, std::span(ids).subspan(i, 1)));
  if (sparse) {
    EXPECT_GT(decoder->sparsity_counts().share(), 0.02);
  }
  for (const float logit : out) EXPECT_TRUE(std::isfinite(logit));
  return out;
}

TEST(Deterministic, LogitsAreTheSameForAnyNumberOfThreads) {
  const test::TempDir dir;
  for (const char* fixture : {"text_model.gguf", "gguf_models/llama_gqa_rope_llama3.gguf", "gguf_models/qwen2.gguf"}) {
    const std::string plain = test::fixture(fixture), zigzag = dir.file("zz.gguf");
    {
      ThreadPool pool(1);
      io::quantize(io::Checkpoint::open(plain), zigzag, {.layout = layout::Id::zz4_k, .progress = false}, pool);
    }
    for (const std::string& path : {plain, zigzag})
      for (const bool sparse : {false, true}) {
        const std::vector<float> one = logits_of(path, 1, sparse);
        for (const int threads : {2, 3, 5})
          EXPECT_EQ(logits_of(path, threads, sparse), one)
              << path << " on " << threads << " threads, sparse " << sparse;
      }
  }
}

}  // namespace
}  // namespace lacuna::model
