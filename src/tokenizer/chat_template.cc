// Prompt formats of chat models. A family is a row of texts; none needs code of its own.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "tokenizer/tokenizer.h"

namespace lacuna {

namespace {

enum Role : uint8_t { kSystem, kUser, kAssistant };
constexpr std::array<std::string_view, 3> kRoleNames = {"system", "user", "assistant"};

enum class SystemText : uint8_t {
  own_turn,         // a turn like others, anywhere
  first_turn,       // a turn, but only at the beginning
  first_user_turn,  // inside the first user turn, before its text
  last_user_turn,   // inside the last one
  refused,
};

struct Turn {
  std::string_view before, after;
};

struct Family {
  std::string_view name;
  std::string_view begin = {};       // before everything
  std::array<Turn, 3> turns;         // by Role; inside a user turn: system text with its own before and after
  std::string_view generation = {};  // behind the last turn, where the answer begins
  std::string_view end = {};         // there, when no answer is asked for
  SystemText system = SystemText::own_turn;
  const char* default_system = nullptr;  // a system turn that stands even where the messages have none
  std::string_view system_head = {};     // before the text of a system turn at the beginning
  std::array<bool, 3> trim{};            // by Role: white space at both ends goes
  bool trim_joined = false;              // trimmed after the system text was put in, not before
  bool alternates = false;               // user and assistant must take turns
  bool thinks = false;                   // earlier answers lose their <think> part, a last one always has one
};

constexpr std::array<Turn, 3> kChatml = {{{"<|im_start|>system\n", "<|im_end|>\n"},
                                          {"<|im_start|>user\n", "<|im_end|>\n"},
                                          {"<|im_start|>assistant\n", "<|im_end|>\n"}}};
constexpr std::string_view kChatmlAnswer = "<|im_start|>assistant\n";
constexpr std::array<Turn, 3> kLlama3 = {{{"<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"},
                                          {"<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"},
                                          {"<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"}}};
constexpr std::array<Turn, 3> kGemma = {
    {{"", "\n\n"}, {"<start_of_turn>user\n", "<end_of_turn>\n"}, {"<start_of_turn>model\n", "<end_of_turn>\n"}}};

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {.name = "chatml", .turns = kChatml, .generation = kChatmlAnswer},
      {.name = "qwen2",
       .turns = kChatml,
       .generation = kChatmlAnswer,
       .default_system = "You are a helpful assistant."},
      {.name = "qwen2.5",
       .turns = kChatml,
       .generation = kChatmlAnswer,
       .default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
      {.name = "qwen3", .turns = kChatml, .generation = kChatmlAnswer, .thinks = true},
      {.name = "smollm2",
       .turns = kChatml,
       .generation = kChatmlAnswer,
       .default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
      {.name = "llama2",
       .turns = {{{"<<SYS>>\n", "\n<</SYS>>\n\n"}, {"<s>[INST] ", " [/INST]"}, {" ", " </s>"}}},
       .system = SystemText::first_user_turn,
       .trim = {false, true, true},
       .trim_joined = true,
       .alternates = true},
      {.name = "llama3",
       .begin = "<|begin_of_text|>",
       .turns = kLlama3,
       .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
       .trim = {true, true, true}},
      {.name = "llama3.1",
       .begin = "<|begin_of_text|>",
       .turns = kLlama3,
       .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
       .default_system = "",
       .system_head = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
       .trim = {true, true, true}},
      {.name = "mistral-v0",
       .begin = "<s>",
       .turns = {{{"", ""}, {"[INST] ", " [/INST]"}, {"", "</s>"}}},
       .system = SystemText::refused,
       .alternates = true},
      {.name = "mistral-v1",
       .begin = "<s>",
       .turns = {{{"", "\n\n"}, {" [INST] ", " [/INST]"}, {" ", "</s>"}}},
       .system = SystemText::first_user_turn,
       .alternates = true},
      {.name = "mistral-v3",
       .begin = "<s>",
       .turns = {{{"", "\n\n"}, {"[INST] ", "[/INST]"}, {" ", "</s>"}}},
       .system = SystemText::last_user_turn,
       .trim = {false, false, true},
       .alternates = true},
      {.name = "mistral-v3-tekken",
       .begin = "<s>",
       .turns = {{{"", "\n\n"}, {"[INST]", "[/INST]"}, {"", "</s>"}}},
       .system = SystemText::last_user_turn,
       .alternates = true},
      {.name = "mistral-v7",
       .begin = "<s>",
       .turns = {{{"[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"}, {"[INST] ", "[/INST]"}, {" ", "</s>"}}}},
      {.name = "mistral-v7-tekken",
       .begin = "<s>",
       .turns = {{{"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}, {"[INST]", "[/INST]"}, {"", "</s>"}}}},
      {.name = "zephyr",
       .turns = {{{"<|system|>\n", "</s>\n"}, {"<|user|>\n", "</s>\n"}, {"<|assistant|>\n", "</s>\n"}}},
       .generation = "<|assistant|>\n"},
      {.name = "gemma",
       .begin = "<bos>",
       .turns = kGemma,
       .generation = "<start_of_turn>model\n",
       .system = SystemText::refused,
       .trim = {false, true, true},
       .alternates = true},
      {.name = "gemma3",
       .begin = "<bos>",
       .turns = kGemma,
       .generation = "<start_of_turn>model\n",
       .system = SystemText::first_user_turn,
       .trim = {false, true, true},
       .alternates = true},
      {.name = "phi3",
       .turns = {{{"<|system|>\n", "<|end|>\n"}, {"<|user|>\n", "<|end|>\n"}, {"<|assistant|>\n", "<|end|>\n"}}},
       .generation = "<|assistant|>\n",
       .end = "<|endoftext|>"},
      {.name = "vicuna",
       .turns = {{{"", " "}, {"USER: ", " "}, {"ASSISTANT: ", "</s>"}}},
       .generation = "ASSISTANT:",
       .system = SystemText::first_turn},
      {.name = "alpaca",
       .turns = {{{"", "\n\n"}, {"### Instruction:\n", "\n\n"}, {"### Response:\n", "\n\n"}}},
       .generation = "### Response:\n"},
  };
  return all;
}

const Family* find_family(std::string_view name) {
  const auto family = std::ranges::find(families(), name, &Family::name);
  return family == families().end() ? nullptr : &*family;
}

/// The system text that a ChatML template writes by itself: a literal turn without an expression in it; else empty.
std::string chatml_default_system(std::string_view jinja) {
  constexpr std::string_view kOpen = "<|im_start|>system";
  for (size_t at = jinja.find(kOpen); at != std::string_view::npos; at = jinja.find(kOpen, at + 1)) {
    std::string_view text = jinja.substr(at + kOpen.size());
    if (text.starts_with("\\n")) {
      text.remove_prefix(2);
    } else if (text.starts_with('\n')) {
      text.remove_prefix(1);
    } else {
      continue;
    }
    const size_t end = text.find("<|im_end|>");
    if (end == std::string_view::npos) continue;
    text = text.substr(0, end);
    if (text.find_first_of("'\"{}\\") == std::string_view::npos) return std::string(text);
  }
  return "";
}

/// The family of a Jinja template, told by the literals in it; empty where none is known.
std::string_view recognise(std::string_view jinja) {
  const auto has = [jinja](std::string_view text) { return jinja.find(text) != std::string_view::npos; };
  // A system text of its own, which no family here knows; ChatML templates may have one, see chatml_default_system.
  const bool has_own_system = has("You are ") || has("default_system_message");
  if (has("<|im_start|>")) {
    if (has("<|im_sep|>") || has("<end_of_utterance>")) return "";
    // Others that think open the answer's <think> themselves.
    const bool opens_thought = has(R"('<think>\n')") || has(R"(assistant\n<think>\n)");
    if (has("<think>")) return has("last_query_index") && !opens_thought ? "qwen3" : "";
    return !has_own_system || !chatml_default_system(jinja).empty() ? "chatml" : "";
  }
  if (has_own_system) return "";
  if (has("[INST]")) {
    if (has("[SYSTEM_PROMPT]")) return has("[SYSTEM_PROMPT] ") ? "mistral-v7" : "mistral-v7-tekken";
    if (has("<<SYS>>")) return "llama2";
    if (has(" [INST]")) return "mistral-v1";
    if (has("[AVAILABLE_TOOLS]")) return has("[INST] ") ? "mistral-v3" : "mistral-v3-tekken";
    return has("[INST] ") && !has("eos_token + ' '") ? "mistral-v0" : "";
  }
  if (has("<|start_header_id|>")) {
    if (!has("Cutting Knowledge Date: ")) return "llama3";
    return has("Today Date: ") ? "llama3.1" : "";
  }
  if (has("<start_of_turn>")) return has("first_user_prefix") ? "gemma3" : "gemma";
  if (has("<|assistant|>")) {
    if (has("<|end|>")) return "phi3";
    return has("content'] + eos_token") ? "zephyr" : "";
  }
  if (has("USER: ") && has("ASSISTANT:")) return "vicuna";
  if (has("### Instruction:") && has("### Response:") && !has("<|EOT|>")) return "alpaca";
  return "";
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\n\r\f\v";
  const size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpaces) + 1 - begin);
}

Role role_of(const ChatMessage& message, std::string_view family) {
  const auto known = std::ranges::find(kRoleNames, message.role);
  if (known == kRoleNames.end()) {
    throw Error("chat template {} has no place for the role '{}'; roles are {}", family, message.role,
                fmt::join(kRoleNames, ", "));
  }
  return static_cast<Role>(known - kRoleNames.begin());
}

/// An answer of a thinking model: earlier ones without their thoughts, those behind the last question with them.
std::string thinking_answer(std::string_view content, bool before_last_question, bool is_last) {
  constexpr std::string_view kOpen = "<think>";
  constexpr std::string_view kClose = "</think>";
  const auto strip_newlines = [](std::string_view text) {
    while (text.starts_with('\n')) text.remove_prefix(1);
    while (text.ends_with('\n')) text.remove_suffix(1);
    return text;
  };
  std::string_view thought;
  if (const size_t close = content.find(kClose); close != std::string_view::npos) {
    thought = content.substr(0, close);
    if (const size_t open = thought.rfind(kOpen); open != std::string_view::npos) {
      thought.remove_prefix(open + kOpen.size());
    }
    thought = strip_newlines(thought);
    content.remove_prefix(content.rfind(kClose) + kClose.size());
    while (content.starts_with('\n')) content.remove_prefix(1);
  }
  if (before_last_question || (!is_last && thought.empty())) return std::string(content);
  while (content.starts_with('\n')) content.remove_prefix(1);
  return fmt::format("<think>\n{}\n</think>\n\n{}", thought, content);
}

}  // namespace

ChatTemplate ChatTemplate::from(std::string_view jinja_or_name) {
  if (const Family* family = find_family(jinja_or_name)) return ChatTemplate(family->name);
  const Family* family = find_family(recognise(jinja_or_name));
  if (!family) {
    constexpr size_t kShown = 60;
    throw Error("chat template {}: none of the known families; pass one with --chat-template NAME: {}",
                jinja_or_name.empty() ? std::string("is missing")
                                      : fmt::format("'{}{}'", jinja_or_name.substr(0, kShown),
                                                    jinja_or_name.size() > kShown ? "..." : ""),
                fmt::join(names(), ", "));
  }
  ChatTemplate result(family->name);
  if (family->name == "chatml") result.default_system_ = chatml_default_system(jinja_or_name);
  if (!result.default_system_.empty()) {
    for (const Family& known : families()) {
      if (known.default_system && result.default_system_ == known.default_system) {
        result.name_ = known.name;
      }
    }
  }
  return result;
}

std::vector<std::string_view> ChatTemplate::names() {
  std::vector<std::string_view> all;
  for (const Family& family : families()) all.push_back(family.name);
  return all;
}

std::string ChatTemplate::render(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  const Family& family = *find_family(name_);
  if (messages.empty()) throw Error("chat template {}: there are no messages", name_);

  std::vector<Role> roles;
  for (const ChatMessage& message : messages) roles.push_back(role_of(message, name_));
  const auto last_user = static_cast<size_t>(roles.rend() - std::ranges::find(roles.rbegin(), roles.rend(), kUser)) - 1;

  std::string text(family.begin);
  const auto add_turn = [&](Role role, std::string_view head, std::string_view content) {
    const Turn& turn = family.turns[role];
    text.append(turn.before).append(head).append(content).append(turn.after);
  };
  if (roles[0] != kSystem) {
    if (family.default_system) {
      add_turn(kSystem, family.system_head, family.default_system);
    } else if (!default_system_.empty()) {
      add_turn(kSystem, family.system_head, default_system_);
    }
  }

  const std::string* system = nullptr;  // waits for its user turn
  Role expected = kUser;
  for (size_t i = 0; i < messages.size(); ++i) {
    const Role role = roles[i];
    std::string_view content = messages[i].content;
    if (role == kSystem) {
      if (family.system == SystemText::refused) {
        throw Error("chat template {} has no place for a system message; put its text into the first user message",
                    name_);
      }
      if (family.system != SystemText::own_turn && i > 0) {
        throw Error("chat template {} takes a system message only at the beginning; this is message {}", name_, i + 1);
      }
      if (family.system == SystemText::first_user_turn || family.system == SystemText::last_user_turn) {
        system = &messages[i].content;
      } else {
        add_turn(role, i == 0 ? family.system_head : "", family.trim[role] ? trimmed(content) : content);
      }
      continue;
    }
    if (family.alternates && role != expected) {
      throw Error("chat template {}: user and assistant must take turns; message {} is from {}, expected {}", name_,
                  i + 1, kRoleNames[role], kRoleNames[expected]);
    }
    expected = role == kUser ? kAssistant : kUser;
    if (family.trim[role]) content = trimmed(content);
    std::string joined;
    if (role == kUser && system && (family.system == SystemText::first_user_turn || i == last_user)) {
      joined.append(family.turns[kSystem].before).append(*system).append(family.turns[kSystem].after);
      joined.append(family.trim_joined ? std::string_view(messages[i].content) : content);
      content = family.trim_joined ? trimmed(joined) : std::string_view(joined);
      system = nullptr;
    } else if (role == kAssistant && family.thinks) {
      content = joined = thinking_answer(content, last_user != SIZE_MAX && i < last_user, i + 1 == messages.size());
    }
    add_turn(role, "", content);
  }
  text.append(add_generation_prompt ? family.generation : family.end);
  return text;
}

}  // namespace lacuna
