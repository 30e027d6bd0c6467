// Real models on a CUDA device and on the CPU: the same greedy tokens, or two candidates that are as good as equal
// where the texts part, and the same perplexity, dense and with inputs left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calibrate/calibrate.h"
#include "eval/perplexity.h"
#include "io/quantize.h"
#include "kernels/cuda_support.h"
#include "loaded_model.h"
#include "model/cuda_decoder.h"
#include "model/decoder.h"
#include "test_support.h"

namespace lacuna::eval {
namespace {

constexpr int64_t kContext = 512, kWindows = 8;
constexpr int kGreedyTokens = 64;

struct Model : test::LoadedModel {
  Tokenizer tokenizer;
  explicit Model(const std::string& path) : LoadedModel(path, usable_cores()), tokenizer(checkpoint.vocabulary()) {}
};

/// docs22m is in the shared data, the others where `lacuna pull` puts them.
std::optional<std::string> find_model(const std::string& name) {
  std::filesystem::path path;
  if (name == "docs22m") {
    path = test::shared_data() / "models/docs22m";
  } else {
    const char *folder = std::getenv("LACUNA_MODELS"), *home = std::getenv("HOME");
    path = std::filesystem::path(folder ? folder : std::string(home ? home : ".") + "/.cache/lacuna/models") / name;
  }
  return std::filesystem::exists(path) ? std::optional(path.string()) : std::nullopt;
}

/// The longer the better: the WikiText-2 test file where the shared data is.
std::string text() {
  const auto wikitext = test::shared_data() / "text/wikitext2-raw.test.txt";
  return test::read_text(std::filesystem::exists(wikitext)
                             ? wikitext
                             : std::filesystem::path(test::kSourceDir) / "scripts/data/quickstart.txt");
}

size_t best(std::span<const float> logits) {
  return size_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// By how much the CPU's logits prefer its own choice to the device's where the texts part; 0 where they do not.
double greedy_margin(Model& model, model::CudaDecoder& gpu, const std::string& prompt) {
  std::vector<int32_t> ids = model.tokenizer.encode(prompt);
  model::Session session(*model.decoder, kContext);
  gpu.truncate(0);
  std::span<const float> expected = model.decoder->forward(session, ids), found = gpu.forward(ids);
  for (int t = 0; t < kGreedyTokens; ++t) {
    const size_t theirs = best(found), ours = best(expected);
    if (theirs != ours) return double(expected[ours]) - double(expected[theirs]);
    ids.push_back(int32_t(ours));
    expected = model.decoder->forward(session, {&ids.back(), 1});
    found = gpu.forward({&ids.back(), 1});
  }
  return 0;
}

model::Thresholds half_of(Model& model) {
  calibrate::CalibrateOptions options;
  options.levels = {0.5};
  options.modes = {model::Mode::uniform};
  options.criteria = {model::Criterion::magnitude, model::Criterion::wina};
  options.tokens = options.ctx = options.sparse_tokens = kContext;
  options.progress = false;
  calibrate::CpuSubject subject(*model.decoder, model.checkpoint);
  const auto set = calibrate::calibrate(subject, model.checkpoint, model.tokenizer.encode(text()), "sha", options).set;
  return set.select(0.5, model::Mode::uniform, model::Criterion::wina, "test");
}

class CudaModels : public test::CudaTest, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Real, CudaModels, testing::Values("docs22m", "smollm2-135m.gguf", "qwen0.5b.gguf"));

TEST_P(CudaModels, SameTokensAndPerplexityAsTheCpu) {
  const auto source = find_model(GetParam());
  if (!source)
    GTEST_SKIP() << "SKIPPED: " << GetParam()
                 << " is not there; run `lacuna pull smollm2-135m`, `lacuna pull qwen2.5-coder-0.5b`, or set "
                    "LACUNA_SHARED_DATA";
  const test::TempDir folder;
  const std::string zigzag = (folder.path() / "zz4_k.gguf").string();
  {
    ThreadPool pool(usable_cores());
    io::quantize(io::Checkpoint::open(*source), zigzag, {.layout = layout::Id::zz4_k, .progress = false}, pool);
  }
  for (const std::string& path : {*source, zigzag}) {
    SCOPED_TRACE(path);
    Model model(path);
    const auto gpu =
        model::CudaDecoder::load(model.checkpoint, model.pool, device(), {.context = kContext, .progress = false});
    for (const char* prompt : {"The capital of France is", "def fibonacci(n):\n", "Once upon a time,", "1, 2, 3,"})
      EXPECT_LE(greedy_margin(model, *gpu, prompt), 0.1) << prompt;

    // On the CPU quantized weights meet inputs of 8 bits, which moves a small model's perplexity by up to 0.7%; the
    // same weights as f16 meet the inputs as they are.
    const std::string exact = (folder.path() / "f16.gguf").string();
    io::quantize(model.checkpoint, exact, {.layout = layout::Id::f16, .progress = false}, model.pool);
    Model reference(exact);
    PerplexityOptions options;
    options.ctx = kContext;
    options.chunks = kWindows;
    options.progress = false;
    /// Returns the share of inputs left out. bound 0: what the text leaves open, a standard error of the perplexity.
    const auto compare = [&](const char* how, double bound) {
      const PerplexityResult expected = perplexity(*reference.decoder, reference.tokenizer, text(), options);
      const double rounded = perplexity(*model.decoder, model.tokenizer, text(), options).ppl;
      const PerplexityResult found = perplexity(*gpu, model.pool, model.tokenizer, text(), options);
      EXPECT_NEAR(found.ppl / expected.ppl, 1, bound > 0 ? bound : expected.std_error / expected.ppl) << how;
      printf(
          "%s, %s: perplexity %.4f; on the CPU %.4f (%+.3f%%), with inputs of 8 bits %.4f (%+.3f%%); inputs left out "
          "%.2f%%\n",
          path.c_str(), how, found.ppl, expected.ppl, 100 * (found.ppl / expected.ppl - 1), rounded,
          100 * (found.ppl / rounded - 1), 100 * found.act_sparsity);
      return found.act_sparsity;
    };
    compare("dense", 0.002);
    if (path == *source) continue;
    // Rounding moves a few inputs over their thresholds, and where tokens run one by one also between two runs of one
    // device, whose sums come in any order: each such run is another sample of the same model.
    model::SparsityOptions half{half_of(model), 4, true};
    model.decoder->set_sparsity(half);
    reference.decoder->set_sparsity(half);
    for (const bool batches : {true, false}) {
      half.mask_batches = batches;
      gpu->count_inputs(true);
      gpu->set_sparsity(half);
      const double share =
          compare(batches ? "half of the inputs left out, in batches" : "half of the inputs left out, one by one", 0);
      EXPECT_NEAR(share, reference.decoder->sparsity_counts().share(), 2e-3);
    }
    gpu->count_inputs(false);  // other launches
    EXPECT_EQ(compare("the same, not counted", 0), 0);
  }
}

}  // namespace
}  // namespace lacuna::eval
