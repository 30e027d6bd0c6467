// src/cli/chat.h - a conversation: history in the key-value cache, one answer a turn.
#pragma once

#include <string>
#include <vector>

#include "cli/generate.h"

namespace lacuna::cli {

class Chat {
 public:
  /// system: empty for none. The referenced objects outlive the chat.
  Chat(const LoadedModel& model, Sequence& sequence, model::Sampler& sampler, ChatTemplate style, std::string system,
       GenerateOptions options);

  /// Answers one message; the new part of the history is all that is computed. An answer that was interrupted is kept
  /// as far as it came. Throws Error, with the history as it was before, when the conversation no longer fits or the
  /// message spells a control token, which would forge a turn.
  Generation ask(const std::string& message, const std::function<void(std::string_view)>& on_text);
  /// Forgets all but the system message.
  void clear();
  /// Ids of the last ask()'s rendered history.
  const std::vector<int32_t>& prompt_ids() const { return prompt_ids_; }

 private:
  const LoadedModel& model_;
  Sequence& sequence_;
  model::Sampler& sampler_;
  ChatTemplate style_;
  std::string system_;
  GenerateOptions options_;
  std::vector<ChatMessage> messages_;
  std::vector<int32_t> prompt_ids_;
};

/// An InterruptGuard lives in the caller. Reads messages from standard input and answers them until its end, /exit, or
/// Ctrl-C at the prompt.
void chat_loop(Chat& chat);

}  // namespace lacuna::cli
