#include "cli/chat.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/say.h"

namespace lacuna::cli {
namespace {

constexpr std::string_view kHelp =
    "/clear  forget the conversation\n"
    "/exit   leave (also Ctrl-D, or Ctrl-C here)\n"
    "/help   this text\n"
    "Ctrl-C while the model answers stops the answer. A line that ends in \\ goes on in the next one.\n";

/// One line without its end; nothing at the end of input or when Ctrl-C was pressed.
std::optional<std::string> read_line() {
  char* line = nullptr;
  size_t size = 0;
  errno = 0;
  const ssize_t got = ::getline(&line, &size, stdin);
  std::string text = got > 0 ? std::string(line, size_t(got)) : std::string();
  std::free(line);
  if (got < 0) return std::nullopt;
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
  return text;
}

std::optional<std::string> read_message(bool terminal) {
  std::string message;
  for (std::string_view prompt = "> ";; prompt = ". ") {
    if (terminal) print(prompt);
    const std::optional<std::string> line = read_line();
    if (!line) {  // the input ends after a line that was to go on
      if (message.ends_with('\n')) message.pop_back();
      return message.empty() ? std::nullopt : std::optional(message);
    }
    if (!line->ends_with('\\')) return message + *line;
    message += line->substr(0, line->size() - 1) + "\n";
  }
}

/// The whole conversation is encoded with its control tokens, so a text that spells one would become it.
void refuse_control_tokens(const Tokenizer& tokenizer, const std::string& name, const std::string& text) {
  const auto parsed = tokenizer.encode(text, {.add_special = false, .parse_special = true});
  if (parsed == tokenizer.encode(text, {.add_special = false, .parse_special = false})) return;
  for (const int32_t id : parsed)
    if (tokenizer.piece(id).empty() && !tokenizer.piece(id, true).empty())
      throw Error("the {} contains {}, a control token of this model", name, tokenizer.piece(id, true));
  throw Error("the {} contains the text of a control token of this model", name);
}

}  // namespace

Chat::Chat(const LoadedModel& model, Sequence& sequence, model::Sampler& sampler, ChatTemplate style,
           std::string system, GenerateOptions options)
    : model_(model),
      sequence_(sequence),
      sampler_(sampler),
      style_(std::move(style)),
      system_(std::move(system)),
      options_(options) {
  refuse_control_tokens(model_.need_tokenizer(), "system message", system_);
  clear();
}

void Chat::clear() {
  messages_.clear();
  if (!system_.empty()) messages_.push_back({"system", system_});
}

Generation Chat::ask(const std::string& message, const std::function<void(std::string_view)>& on_text) {
  refuse_control_tokens(model_.need_tokenizer(), "message", message);
  messages_.push_back({"user", message});
  try {
    prompt_ids_ = model_.need_tokenizer().encode(style_.render(messages_), {.add_eos = false, .parse_special = true});
    Generation answer = generate(model_, sequence_, sampler_, prompt_ids_, options_, on_text);
    messages_.push_back({"assistant", answer.text});
    return answer;
  } catch (...) {
    messages_.pop_back();
    throw;
  }
}

void chat_loop(Chat& chat) {
  const bool terminal = ::isatty(STDIN_FILENO) == 1;
  if (terminal) print("Chat; /help shows the commands, Ctrl-D leaves.\n");
  for (;;) {
    const std::optional<std::string> message = read_message(terminal);
    if (!message || InterruptGuard::interrupted()) break;
    if (*message == "/exit") return;
    if (message->empty()) continue;
    if (*message == "/help") {
      print(kHelp);
      continue;
    }
    if (*message == "/clear") {
      chat.clear();
      continue;
    }
    if (message->starts_with('/') && message->find_first_of(" /", 1) == std::string::npos) {
      say("lacuna: unknown command {}; /help shows the commands\n", *message);
      continue;
    }
    try {
      const Generation answer = chat.ask(*message, print);
      print("\n");
      if (answer.stop == Stop::context_full)
        say("lacuna: the context is full, so the answer ends here; /clear starts a new conversation\n");
      if (answer.stop == Stop::interrupted) say("lacuna: stopped\n");
    } catch (const Error& error) {
      if (!terminal) throw;
      say("lacuna: {}; /clear starts a new conversation\n", printable(error.what()));
    }
    InterruptGuard::clear();
  }
  if (terminal) print("\n");
}

}  // namespace lacuna::cli
