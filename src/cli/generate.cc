#include "cli/generate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>

#include "core/error.h"
#include "core/progress.h"

namespace lacuna::cli {
namespace {

constexpr int64_t kPrefillStep = 512;  // tokens between two looks at Ctrl-C

volatile std::sig_atomic_t g_interrupted = 0;
struct sigaction g_old_action;

void on_interrupt(int) { g_interrupted = 1; }

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Where NaN or infinity is first met when these tokens are run; for the message of a model that gives no logits.
std::string first_bad_place(model::Decoder& decoder, std::span<const int32_t> ids) {
  std::string place;
  decoder.set_observer([&](int64_t layer, model::Input input, const float* x, int64_t M, int64_t K, int64_t) {
    if (place.empty() && !std::all_of(x, x + M * K, [](float value) { return std::isfinite(value); }))
      place = fmt::format("the input {} of layer {}", name_of(input), layer);
  });
  model::Session session(decoder, int64_t(ids.size()), kernels::KvType::f32);
  decoder.forward(session, ids, model::Decoder::Want::layers, {});
  decoder.set_observer({});
  return place.empty() ? "the output head" : place;
}

}  // namespace

std::string_view name_of(Stop stop) {
  switch (stop) {
    case Stop::limit:
      return "limit";
    case Stop::end_token:
      return "end";
    case Stop::context_full:
      return "context";
    case Stop::interrupted:
      break;
  }
  return "interrupted";
}

InterruptGuard::InterruptGuard() {
  g_interrupted = 0;
  struct sigaction action {};
  action.sa_handler = on_interrupt;  // without SA_RESTART: a read that waits for the user returns
  ::sigaction(SIGINT, &action, &g_old_action);
}
InterruptGuard::~InterruptGuard() { ::sigaction(SIGINT, &g_old_action, nullptr); }
bool InterruptGuard::interrupted() { return g_interrupted != 0; }
void InterruptGuard::clear() { g_interrupted = 0; }

void check_prompt(const model::Config& config, std::span<const int32_t> prompt, int64_t capacity) {
  if (prompt.empty())
    throw Error("the prompt is empty and the model adds no BOS token; give at least one token of text");
  if (int64_t(prompt.size()) > capacity)
    throw Error("the prompt has {} tokens, but the context holds {} (the model allows {}); shorten it or raise --ctx",
                prompt.size(), capacity, config.n_ctx);
}

Generation generate(const LoadedModel& model, Sequence& sequence, model::Sampler& sampler,
                    std::span<const int32_t> prompt, const GenerateOptions& options,
                    const std::function<void(std::string_view)>& on_text) {
  model::Engine& engine = sequence.engine;
  check_prompt(engine.config(), prompt, engine.capacity());
  const int64_t length = int64_t(prompt.size());

  // Keep what the cache already holds of the prompt, all but its last token.
  const auto same = std::mismatch(sequence.ids.begin(), sequence.ids.end(), prompt.begin(), prompt.end()).first;
  const int64_t kept = std::min<int64_t>(same - sequence.ids.begin(), length - 1);
  engine.truncate(kept);
  sequence.ids.resize(size_t(kept));

  Generation out;
  /// Runs ids and takes the token after them.
  const auto advance = [&](std::span<const int32_t> ids) {
    const auto add = [&] { sequence.ids.insert(sequence.ids.end(), ids.begin(), ids.end()); };
    try {
      const int32_t id = engine.next(ids, sampler);
      add();
      return id;
    } catch (const model::BadLogits& error) {
      add();
      if (!model.decoder) throw Error("{}: {}", model.checkpoint.path(), error.what());
      throw Error("{}: {} (NaN or infinity is first met in {})", model.checkpoint.path(), error.what(),
                  first_bad_place(*model.decoder, sequence.ids));
    }
  };
  const auto prefill_start = std::chrono::steady_clock::now();
  std::span<const int32_t> rest = prompt.subspan(size_t(kept));
  out.prefill_tokens = int64_t(rest.size());
  int32_t next = -1;
  {
    Progress progress("prompt", int64_t(rest.size()), "tokens");
    while (int64_t(rest.size()) > kPrefillStep) {
      if (InterruptGuard::interrupted()) {
        out.stop = Stop::interrupted;
        out.prefill_tokens -= int64_t(rest.size());
        out.prefill_s = seconds_since(prefill_start);
        return out;
      }
      const auto step = rest.first(kPrefillStep);
      engine.append(step);
      sequence.ids.insert(sequence.ids.end(), step.begin(), step.end());
      rest = rest.subspan(kPrefillStep);
      progress.add(kPrefillStep);
    }
    for (const int32_t id : prompt) sampler.accept(id);
    if (options.max_tokens == 0) {
      engine.append(rest);
      sequence.ids.insert(sequence.ids.end(), rest.begin(), rest.end());
    } else {
      next = advance(rest);
    }
  }
  out.prefill_s = seconds_since(prefill_start);

  Utf8Stream stream;
  const auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    out.text += text;
    on_text(text);
  };
  const auto decode_start = std::chrono::steady_clock::now();
  while (options.max_tokens < 0 || int64_t(out.ids.size()) < options.max_tokens) {
    const int32_t id = next;
    if (!options.ignore_end && model.tokenizer && model.tokenizer->ends_generation(id)) {
      out.stop = Stop::end_token;
      break;
    }
    sampler.accept(id);
    out.ids.push_back(id);
    if (model.tokenizer) emit(stream.push(model.tokenizer->piece(id)));
    if (InterruptGuard::interrupted()) {
      out.stop = Stop::interrupted;
      break;
    }
    if (int64_t(out.ids.size()) == options.max_tokens) break;
    if (engine.length() == engine.capacity()) {
      out.stop = Stop::context_full;
      break;
    }
    next = advance({&id, 1});
    ++out.decode_tokens;
  }
  out.decode_s = out.decode_tokens > 0 ? seconds_since(decode_start) : 0;
  emit(stream.finish());
  return out;
}

}  // namespace lacuna::cli
