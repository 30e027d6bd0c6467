// Any bytes as the questions of each task: read or refused with an Error, and what was read can be scored.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "eval/questions.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lacuna;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const std::string_view name : eval::task_names()) {
    const eval::Task task = eval::task_named(name);
    try {
      for (const eval::Question& question : eval::read_questions(task, {"fuzz", text})) {
        if (question.gold < 0 || question.gold >= int64_t(question.choices.size()) || question.line < 1) std::abort();
        for (const eval::Choice& choice : question.choices)
          if (choice.characters < 0 || choice.continuation.empty()) std::abort();
      }
    } catch (const Error&) {
    }
  }
  return 0;
}
