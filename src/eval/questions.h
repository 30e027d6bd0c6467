// src/eval/questions.h - the questions of zero-shot tasks, read from the files of their authors and written as
// EleutherAI's lm-evaluation-harness writes them (lm_eval/tasks; docs/evaluation.md has the formats).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lacuna::eval {

enum class Task : uint8_t { hellaswag, arc_easy, arc_challenge, piqa, winogrande, lambada };

/// "hellaswag", "arc-easy", "arc-challenge", "piqa", "winogrande", "lambada".
std::string_view name_of(Task task);
std::span<const std::string_view> task_names();
/// Throws Error that lists the names.
Task task_named(std::string_view name);
/// Whether the choices differ in length, so that accuracy is given by likelihood per character too.
bool has_acc_norm(Task task);

/// What is scored: the continuation, given the context.
struct Choice {
  std::string context, continuation;
  int64_t characters = 0;  // of the choice as its author wrote it: what acc_norm divides by
};

struct Question {
  int64_t line = 0;             // where it begins in its file, from 1
  std::vector<Choice> choices;  // one of lambada, whose last word is to be guessed
  int64_t gold = 0;             // the right one
};

/// A file's name and its bytes.
struct Source {
  std::string file;
  std::string_view text;
};

/// All questions of a file. labels: of piqa, a line a question, 0 or 1; nullptr: the rows hold them. Throws Error
/// naming file and line for a row that lacks something, whose answer is none of its choices, or that is no JSON; for a
/// file without rows, a compressed one, one of another task (and names it), and labels of another number than rows.
std::vector<Question> read_questions(Task task, const Source& data, const Source* labels = nullptr);

}  // namespace lacuna::eval
