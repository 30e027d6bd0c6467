// src/eval/perplexity.h - perplexity of a text under the two protocols of the field.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "core/thread_pool.h"
#include "model/decoder.h"
#include "model/engine.h"
#include "tokenizer/tokenizer.h"

namespace lacuna::eval {

enum class Protocol : uint8_t {
  hf,         // windows of ctx tokens, every token but the first of a window scored (what papers report)
  llama_cpp,  // the same windows, first token replaced by BOS where the model adds one, second half scored
              // (llama-perplexity)
};

struct PerplexityOptions {
  int64_t ctx = 2048;
  Protocol protocol = Protocol::hf;
  int64_t chunks = 0;                         // 0: all complete windows
  kernels::KvType kv = kernels::KvType::f16;  // of the CPU's
  bool progress = true;
  /// Optional: told how many positions will be scored, before the first of them.
  std::function<void(int64_t rows)> on_start;
  /// Optional: receives the logits of every scored position, in order. logits: [n_vocab].
  std::function<void(std::span<const float> logits)> on_logits;
  /// Optional: told after each window how many positions it scored.
  std::function<void(int64_t rows)> on_window;
};

struct PerplexityResult {
  double ppl = 0;        // exp(mean negative log likelihood)
  double std_error = 0;  // of ppl, from the spread of the token losses
  int64_t tokens = 0;    // scored
  int64_t windows = 0;
  /// Where BOS stands: nowhere, once before the whole text (hf), or at the beginning of each window (llama_cpp).
  enum class Bos : uint8_t { none, text, windows };
  Bos bos = Bos::none;
  std::string text_sha256;
  double act_sparsity = 0;  // realised, by weight bytes; 0 for a dense decoder
};

/// Of the model as it is set: sparse where set_sparsity said so. On the CPU that takes mask_batches, else it would run
/// dense; on a device tokens run in batches with it, else one by one. engine: of a capacity of options.ctx or more.
/// pool: for the losses. Throws Error when the text has fewer than one window ("needs N tokens, the text has M") or a
/// logit is NaN (names the position).
PerplexityResult perplexity(model::Engine& engine, ThreadPool& pool, const Tokenizer& tokenizer, std::string_view text,
                            const PerplexityOptions& options);
/// On the CPU, with a cache of options.kv.
PerplexityResult perplexity(model::Decoder& decoder, const Tokenizer& tokenizer, std::string_view text,
                            const PerplexityOptions& options);

/// "no", "before the text", "in every window".
std::string_view name_of(PerplexityResult::Bos bos);

/// Tokens of such a run at positions from `dense_prefix` of their windows on: those that leave inputs out.
int64_t tokens_behind(int64_t dense_prefix, const PerplexityOptions& options, const PerplexityResult& result);

}  // namespace lacuna::eval
