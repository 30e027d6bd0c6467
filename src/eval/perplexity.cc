#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "core/sha256.h"

namespace lacuna::eval {
namespace {

void check_context(const model::Config& config, const PerplexityOptions& options) {
  if (options.ctx < 2 || options.ctx > config.n_ctx)
    throw Error("perplexity with a context of {} tokens; this model takes 2 to {}", options.ctx, config.n_ctx);
}

}  // namespace

PerplexityResult perplexity(model::Decoder& decoder, const Tokenizer& tokenizer, std::string_view text,
                            const PerplexityOptions& options) {
  check_context(decoder.config(), options);
  model::CpuEngine engine(decoder, options.ctx, options.kv);
  return perplexity(engine, decoder.pool(), tokenizer, text, options);
}

PerplexityResult perplexity(model::Engine& engine, ThreadPool& pool, const Tokenizer& tokenizer, std::string_view text,
                            const PerplexityOptions& options) {
  const model::Config& config = engine.config();
  check_context(config, options);
  if (options.chunks < 0) throw Error("chunks = {}, expected 0 (all) or more", options.chunks);
  std::vector<int32_t> ids = tokenizer.encode(text);
  const int64_t ctx = options.ctx, available = int64_t(ids.size()) / ctx;
  if (available < 1)
    throw Error(
        "perplexity with a context of {} needs {} tokens, the text has {}; take a longer text or a smaller context",
        ctx, ctx, ids.size());

  PerplexityResult result;
  result.windows = options.chunks > 0 ? std::min(options.chunks, available) : available;
  using Bos = PerplexityResult::Bos;
  if (tokenizer.adds_bos()) result.bos = options.protocol == Protocol::llama_cpp ? Bos::windows : Bos::text;
  result.text_sha256 = sha256_hex(std::as_bytes(std::span(text)));
  // Position p of a window predicts token p + 1. llama.cpp scores the predictions of positions ctx/2 .. ctx-2.
  const int64_t first = options.protocol == Protocol::llama_cpp ? ctx / 2 : 0;
  const int64_t scored = ctx - 1 - first;
  if (scored < 1) throw Error("protocol llama.cpp needs a context of 3 tokens or more, got {}", ctx);
  if (options.on_start) options.on_start(result.windows * scored);

  std::optional<Progress> progress;
  if (options.progress) progress.emplace("Perplexity", result.windows * ctx, "tokens");
  std::vector<double> losses(size_t(scored), 0.0);
  double sum = 0, sum_squares = 0;
  for (int64_t window = 0; window < result.windows; ++window) {
    const std::span<int32_t> tokens = std::span(ids).subspan(size_t(window * ctx), size_t(ctx));
    if (result.bos == Bos::windows) tokens[0] = tokenizer.bos();
    engine.truncate(0);
    if (first > 0) engine.append(tokens.first(size_t(first)));
    const auto sink = [&](int64_t begin, int64_t count, const float* logits) {
      pool.parallel_for(count, 4, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; ++row) {
          const float* values = logits + row * config.n_vocab;
          const int32_t next = tokens[size_t(first + begin + row + 1)];
          losses[size_t(begin + row)] = kernels::log_sum_exp(values, config.n_vocab) - double(values[next]);
        }
      });
      if (options.on_logits)
        for (int64_t row = 0; row < count; ++row)
          options.on_logits({logits + row * config.n_vocab, size_t(config.n_vocab)});
    };
    // The last token is not run: nothing of this window follows it.
    engine.score(tokens.subspan(size_t(first), size_t(scored)), sink);
    for (int64_t i = 0; i < scored; ++i) {
      const double loss = losses[size_t(i)];
      if (!std::isfinite(loss))
        throw Error(
            "the model produced NaN or infinite logits at position {} of window {} (token {} of the text); no "
            "perplexity can be given",
            first + i, window, window * ctx + first + i);
      sum += loss;
      sum_squares += loss * loss;
    }
    result.tokens += scored;
    if (progress) progress->add(ctx);
    if (options.on_window) options.on_window(scored);
  }
  const auto n = double(result.tokens);
  const double mean = sum / n;
  const double variance = std::max(0.0, sum_squares / n - mean * mean);
  result.ppl = std::exp(mean);
  result.act_sparsity = engine.sparsity_counts().share();
  result.std_error = n > 1 ? result.ppl * std::sqrt(variance / (n - 1)) : 0.0;
  return result;
}

std::string_view name_of(PerplexityResult::Bos bos) {
  switch (bos) {
    case PerplexityResult::Bos::text:
      return "before the text";
    case PerplexityResult::Bos::windows:
      return "in every window";
    case PerplexityResult::Bos::none:
      break;
  }
  return "no";
}

int64_t tokens_behind(int64_t dense_prefix, const PerplexityOptions& options, const PerplexityResult& result) {
  return result.windows * std::max<int64_t>(0, options.ctx - 1 - dense_prefix);  // the last token is not run
}

}  // namespace lacuna::eval
