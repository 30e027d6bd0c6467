// src/eval/zero_shot.h - accuracy of a model on questions that it never saw an example of, computed as EleutherAI's
// lm-evaluation-harness does (lm_eval/api/model.py, lm_eval/api/task.py, lm_eval/models/huggingface.py).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "eval/questions.h"
#include "model/engine.h"
#include "tokenizer/tokenizer.h"

namespace lacuna::eval {

/// A context and its continuation as tokens, no longer than the context of the model and one more, which is not run.
struct ChoiceTokens {
  std::vector<int32_t> ids;
  int64_t first = 0;  // the continuation begins at ids[first], first >= 1
};

struct QuestionTokens {
  std::vector<ChoiceTokens> choices;
  int64_t shared = 0;  // leading ids that all choices have in common, none of them scored from: run once
  bool truncated = false;
};

struct TaskTokens {
  std::vector<QuestionTokens> questions;
  int64_t longest = 1;    // positions that an engine needs
  int64_t truncated = 0;  // questions that lost tokens at their left
  int64_t run = 0;        // tokens that evaluate() runs
};

/// The ids of the context, and what the ids of context and continuation together have behind as many; white space at
/// the end of the context goes to the continuation; an empty context is BOS, where the model has none EOS. Cut from the
/// left to ctx + 1 ids. file: of the questions, for errors. Throws Error naming its line where a continuation has no
/// token of its own or more than ctx.
TaskTokens tokenize(std::span<const Question> questions, const Tokenizer& tokenizer, int64_t ctx,
                    const std::string& file);

struct Likelihood {
  double sum = 0;      // log-likelihood of the continuation, nats
  bool greedy = true;  // each of its tokens is the likeliest one; of equals, the first
};

struct ZeroShotOptions {
  bool progress = true;
  /// Optional: told the likelihoods of each question's choices, in order.
  std::function<void(const Question&, const QuestionTokens&, std::span<const Likelihood>)> on_question;
};

/// A mean over the questions and its standard error: the sample's standard deviation / sqrt(n), NaN for one question.
struct Mean {
  double value = 0, error = 0;
};
Mean mean_of(std::span<const double> values);

/// The choice of the largest likelihood, divided by its number of characters where asked; of equals, the first.
int64_t best_of(std::span<const Likelihood> likelihoods, std::span<const Choice> choices, bool per_character);

struct TaskResult {
  int64_t n = 0;
  Mean acc;       // of lambada: each token of the last word is the likeliest
  Mean acc_norm;  // where has_acc_norm(task)
  Mean ppl;       // of lambada: exp(-mean log-likelihood of the last word)
};

/// questions, tokens: the same ones; engine: of a capacity of tokens.longest or more. The choices of a question share
/// their context's cache. Throws Error where a logit is NaN or infinite (names file and line).
TaskResult evaluate(model::Engine& engine, ThreadPool& pool, Task task, std::span<const Question> questions,
                    const TaskTokens& tokens, const std::string& file, const ZeroShotOptions& options = {});

/// Tokens of such a run at positions from `dense_prefix` on: those that leave inputs out.
int64_t tokens_behind(int64_t dense_prefix, const TaskTokens& tokens);

}  // namespace lacuna::eval
