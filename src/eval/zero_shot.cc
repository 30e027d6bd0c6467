#include "eval/zero_shot.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/error.h"
#include "core/progress.h"
#include "eval/python_text.h"

namespace lacuna::eval {
namespace {

struct Encoded {
  ChoiceTokens tokens;
  bool truncated = false;
};

Encoded encode(const Choice& choice, const Tokenizer& tokenizer, int64_t ctx, const std::string& where) {
  Encoded out;
  std::vector<int32_t>& ids = out.tokens.ids;
  const Tokenizer::EncodeOptions goes_on{.add_special = true, .add_eos = false, .parse_special = false};
  std::vector<int32_t> continuation;
  if (choice.context.empty()) {
    continuation = tokenizer.encode(choice.continuation, {.add_special = false, .add_eos = false});
    const int32_t prefix = tokenizer.bos() >= 0 ? tokenizer.bos() : tokenizer.eos();
    if (prefix < 0)
      throw Error("{}: the context is empty, and the model has neither BOS nor EOS to put in its place", where);
    if (continuation.empty() || continuation[0] != prefix) ids.push_back(prefix);
  } else {
    const std::string_view context = strip_end(choice.context);
    ids = tokenizer.encode(context, goes_on);
    continuation = tokenizer.encode(choice.context + choice.continuation, goes_on);
    continuation.erase(continuation.begin(), continuation.begin() + int64_t(std::min(ids.size(), continuation.size())));
    if (ids.empty()) throw Error("{}: the context is white space, which leaves no token to begin with", where);
  }
  // An empty context may take its first token from the continuation.
  const size_t taken = ids.empty() ? 1 : 0;
  if (continuation.size() <= taken)
    throw Error("{}: the continuation \"{}\" has no token of its own behind its context", where, choice.continuation);
  const auto scored = int64_t(continuation.size() - taken);
  if (scored > ctx) throw Error("{}: a continuation of {} tokens does not fit a context of {}", where, scored, ctx);
  ids.insert(ids.end(), continuation.begin(), continuation.end());
  const int64_t excess = int64_t(ids.size()) - (ctx + 1);
  out.truncated = excess > 0;
  if (out.truncated) ids.erase(ids.begin(), ids.begin() + excess);
  out.tokens.first = int64_t(ids.size()) - scored;
  return out;
}

/// Leading ids that all choices have and that predict nothing which is scored.
int64_t shared_by(std::span<const ChoiceTokens> choices) {
  const ChoiceTokens& model = choices[0];
  int64_t shared = model.first - 1;
  for (const ChoiceTokens& choice : choices.subspan(1)) {
    shared = std::min(shared, choice.first - 1);
    const auto end = model.ids.begin() + shared;
    shared = std::mismatch(model.ids.begin(), end, choice.ids.begin()).first - model.ids.begin();
  }
  return shared;
}

/// Tokens of a choice that are run: nothing follows the last one.
int64_t run_of(const ChoiceTokens& choice) { return int64_t(choice.ids.size()) - 1; }

/// engine: holds the first `shared` ids of the choice. losses: room for its scored tokens.
Likelihood score(model::Engine& engine, ThreadPool& pool, const ChoiceTokens& choice, int64_t shared,
                 std::vector<double>& losses, std::vector<uint8_t>& likeliest) {
  const int64_t n_vocab = engine.config().n_vocab, scored = int64_t(choice.ids.size()) - choice.first;
  losses.assign(size_t(scored), 0);
  likeliest.assign(size_t(scored), 0);
  const auto sink = [&](int64_t begin, int64_t count, const float* logits) {
    pool.parallel_for(count, 1, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        const int64_t next = shared + begin + row + 1;
        if (next < choice.first) continue;
        const float* values = logits + row * n_vocab;
        const int32_t id = choice.ids[size_t(next)];
        losses[size_t(next - choice.first)] = double(values[id]) - kernels::log_sum_exp(values, n_vocab);
        likeliest[size_t(next - choice.first)] = std::max_element(values, values + n_vocab) - values == id;
      }
    });
  };
  engine.score(std::span(choice.ids).subspan(size_t(shared), size_t(run_of(choice) - shared)), sink);
  Likelihood out;
  for (int64_t i = 0; i < scored; ++i) {
    out.sum += losses[size_t(i)];
    out.greedy = out.greedy && likeliest[size_t(i)] != 0;
  }
  return out;
}

}  // namespace

TaskTokens tokenize(std::span<const Question> questions, const Tokenizer& tokenizer, int64_t ctx,
                    const std::string& file) {
  TaskTokens out;
  for (const Question& question : questions) {
    const std::string where = fmt::format("{}: line {}", file, question.line);
    QuestionTokens& tokens = out.questions.emplace_back();
    for (const Choice& choice : question.choices) {
      Encoded encoded = encode(choice, tokenizer, ctx, where);
      tokens.truncated = tokens.truncated || encoded.truncated;
      tokens.choices.push_back(std::move(encoded.tokens));
    }
    tokens.shared = shared_by(tokens.choices);
    out.truncated += tokens.truncated;
    out.run += tokens.shared;
    for (const ChoiceTokens& choice : tokens.choices) {
      out.run += run_of(choice) - tokens.shared;
      out.longest = std::max(out.longest, run_of(choice));
    }
  }
  return out;
}

Mean mean_of(std::span<const double> values) {
  const auto n = double(values.size());
  Mean out{0, std::numeric_limits<double>::quiet_NaN()};
  for (const double value : values) out.value += value;
  if (values.empty()) return out;
  out.value /= n;
  if (values.size() == 1) return out;
  double squares = 0;
  for (const double value : values) squares += (value - out.value) * (value - out.value);
  out.error = std::sqrt(squares / (n - 1)) / std::sqrt(n);
  return out;
}

int64_t best_of(std::span<const Likelihood> likelihoods, std::span<const Choice> choices, bool per_character) {
  const auto value = [&](size_t i) {
    return per_character ? likelihoods[i].sum / double(choices[i].characters) : likelihoods[i].sum;
  };
  size_t best = 0;
  for (size_t i = 1; i < likelihoods.size(); ++i)
    if (value(i) > value(best)) best = i;
  return int64_t(best);
}

TaskResult evaluate(model::Engine& engine, ThreadPool& pool, Task task, std::span<const Question> questions,
                    const TaskTokens& tokens, const std::string& file, const ZeroShotOptions& options) {
  if (engine.capacity() < tokens.longest)
    throw Error("{}: a question has {} tokens, the engine's cache holds {}", file, tokens.longest, engine.capacity());
  std::optional<Progress> progress;
  if (options.progress) progress.emplace(std::string(name_of(task)), tokens.run, "tokens");
  std::vector<double> right, right_norm, sums, losses;
  std::vector<uint8_t> likeliest;
  std::vector<Likelihood> likelihoods;
  for (size_t q = 0; q < questions.size(); ++q) {
    const Question& question = questions[q];
    const QuestionTokens& own = tokens.questions[q];
    likelihoods.clear();
    engine.truncate(0);
    if (own.shared > 0) engine.append(std::span(own.choices[0].ids).first(size_t(own.shared)));
    int64_t run = own.shared;
    for (const ChoiceTokens& choice : own.choices) {
      engine.truncate(own.shared);
      likelihoods.push_back(score(engine, pool, choice, own.shared, losses, likeliest));
      if (!std::isfinite(likelihoods.back().sum))
        throw Error("{}: line {}: the model produced NaN or infinite logits; no accuracy can be given", file,
                    question.line);
      run += run_of(choice) - own.shared;
    }
    if (task == Task::lambada) {
      right.push_back(likelihoods[0].greedy ? 1 : 0);
      sums.push_back(likelihoods[0].sum);
    } else {
      right.push_back(best_of(likelihoods, question.choices, false) == question.gold ? 1 : 0);
    }
    if (has_acc_norm(task)) right_norm.push_back(best_of(likelihoods, question.choices, true) == question.gold ? 1 : 0);
    if (options.on_question) options.on_question(question, own, likelihoods);
    if (progress) progress->add(run);
  }
  TaskResult out;
  out.n = int64_t(questions.size());
  out.acc = mean_of(right);
  out.acc_norm = mean_of(right_norm);
  const Mean mean = mean_of(sums);
  out.ppl = {std::exp(-mean.value), std::exp(-mean.value) * mean.error};
  return out;
}

int64_t tokens_behind(int64_t dense_prefix, const TaskTokens& tokens) {
  int64_t out = 0;
  for (const QuestionTokens& question : tokens.questions) {
    out += std::max<int64_t>(0, question.shared - dense_prefix);
    for (const ChoiceTokens& choice : question.choices)
      out += std::max<int64_t>(0, run_of(choice) - std::max(question.shared, dense_prefix));
  }
  return out;
}

}  // namespace lacuna::eval
