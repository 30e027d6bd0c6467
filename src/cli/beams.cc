#include "cli/beams.h"

#include <chrono>
#include <limits>

#include "core/error.h"
#include "core/progress.h"

namespace lacuna::cli {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::string text_of(const LoadedModel& model, std::span<const int32_t> ids) {
  if (!model.tokenizer) return "";
  Utf8Stream stream;
  std::string out;
  for (const int32_t id : ids) out += stream.push(model.tokenizer->piece(id));
  return out + stream.finish();
}

BeamRun search_beams(const LoadedModel& model, model::BeamEngine& engine, std::span<const int32_t> prompt,
                     const GenerateOptions& options) {
  check_prompt(engine.config(), prompt, engine.capacity());
  model::BeamOptions wanted;
  wanted.max_tokens = options.max_tokens < 0 ? std::numeric_limits<int64_t>::max() : options.max_tokens;
  if (model.tokenizer && !options.ignore_end)
    wanted.ends = [&](int32_t id) { return model.tokenizer->ends_generation(id); };
  model::BeamSearch search(engine, wanted);

  BeamRun out;
  Generation& best = out.best;
  const auto prefill_start = std::chrono::steady_clock::now();
  search.start(prompt);
  best.prefill_tokens = int64_t(prompt.size());
  best.prefill_s = seconds_since(prefill_start);

  Progress progress("Search", options.max_tokens, "tokens");
  const auto decode_start = std::chrono::steady_clock::now();
  bool interrupted = false;
  int64_t steps = 0;
  while (!(interrupted = InterruptGuard::interrupted()) && search.step()) {
    ++steps;
    progress.add(1);
  }
  best.decode_tokens = std::max<int64_t>(0, steps - 1);  // the first comes from the prompt's logits
  best.decode_s = best.decode_tokens > 0 ? seconds_since(decode_start) : 0;
  out.beam_tokens = search.tokens_run();
  out.texts = search.texts();
  best.ids = out.texts[0].ids;
  best.text = text_of(model, best.ids);
  if (interrupted)
    best.stop = Stop::interrupted;
  else if (out.texts[0].ended)
    best.stop = Stop::end_token;
  else
    best.stop = int64_t(best.ids.size()) == options.max_tokens ? Stop::limit : Stop::context_full;
  return out;
}

}  // namespace lacuna::cli
