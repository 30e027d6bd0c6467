// src/cli/generate.h - the generation loop: prompt in, text out as it is made, with its timing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "model/engine.h"
#include "model/sampler.h"

namespace lacuna::cli {

enum class Stop : uint8_t { limit, end_token, context_full, interrupted };
/// "limit", "end", "context", "interrupted".
std::string_view name_of(Stop stop);

struct Generation {
  std::vector<int32_t> ids;  // generated, without the token that ended it
  std::string text;
  Stop stop = Stop::limit;
  int64_t prefill_tokens = 0, decode_tokens = 0;  // tokens run through the model before and after the first new one
  double prefill_s = 0, decode_s = 0;

  double prefill_tok_s() const { return prefill_s > 0 ? double(prefill_tokens) / prefill_s : 0; }
  double decode_tok_s() const { return decode_s > 0 ? double(decode_tokens) / decode_s : 0; }
};

/// One sequence in the key-value cache and the ids that it holds.
struct Sequence {
  model::Engine& engine;
  std::vector<int32_t> ids = {};
};

struct GenerateOptions {
  int64_t max_tokens = -1;  // -1: until the model ends or the context is full
  bool ignore_end = false;
};

/// Throws Error when the prompt is empty or longer than `capacity`.
void check_prompt(const model::Config& config, std::span<const int32_t> prompt, int64_t capacity);

/// Makes the cache hold `prompt` (only what differs from it is computed; the last token always is, for its logits),
/// then generates. on_text receives whole characters. Throws Error when the prompt is empty or does not fit.
Generation generate(const LoadedModel& model, Sequence& sequence, model::Sampler& sampler,
                    std::span<const int32_t> prompt, const GenerateOptions& options,
                    const std::function<void(std::string_view)>& on_text);

/// While it lives, Ctrl-C sets a flag instead of ending the program.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  static bool interrupted();
  static void clear();
};

}  // namespace lacuna::cli
