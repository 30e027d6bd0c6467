// src/tokenizer/tokenizer.h - text to ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/vocabulary.h"

namespace lacuna {

class Tokenizer {
 public:
  /// Throws Error for a vocabulary that cannot work (no tokenizer, unknown pre-tokenizer: lists the known ones, sizes
  /// that disagree).
  explicit Tokenizer(Vocabulary vocabulary);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  struct EncodeOptions {
    bool add_special = true;     // BOS (and EOS) where the model adds them
    bool add_eos = true;         // with add_special; false: BOS only, for a text that goes on
    bool parse_special = false;  // control tokens written in the text become their ids (templates yes, user text no)
  };
  /// Invalid UTF-8 is tokenized byte by byte where the model has bytes. If add_special is asked and the text begins
  /// with the BOS token itself (parse_special), no second BOS is put before it.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options) const;
  std::vector<int32_t> encode(std::string_view text) const { return encode(text, EncodeOptions{}); }
  /// The bytes of one token; control tokens give their text only if asked.
  std::string piece(int32_t id, bool special = false) const;
  /// All ids as text. The space that a sentencepiece model puts before the text is removed again at the start.
  std::string decode(std::span<const int32_t> ids, bool special = false) const;

  int32_t vocab_size() const;
  bool adds_bos() const;
  bool adds_eos() const;
  /// -1 where the model has none.
  int32_t bos() const;
  int32_t eos() const;
  /// True for every token that ends a generation (EOS, EOT, <|im_end|> and so on).
  bool ends_generation(int32_t id) const;
  const Vocabulary& vocabulary() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Turns a stream of token bytes into text that is always whole UTF-8 characters.
class Utf8Stream {
 public:
  /// Returns what may be printed now; an unfinished character waits for its next bytes. Bytes that can never become a
  /// character become U+FFFD.
  std::string push(std::string_view bytes);
  /// What is still waiting at the end (an unfinished character becomes U+FFFD).
  std::string finish();

 private:
  std::string pending_;
};

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

/// A prompt format of a family of chat models.
class ChatTemplate {
 public:
  /// Recognises the family from the model's own Jinja text, or from a family's name ("chatml", "llama2", "llama3",
  /// ...). Throws Error that lists the names and says how to pass one (--chat-template NAME) otherwise.
  static ChatTemplate from(std::string_view jinja_or_name);
  static std::vector<std::string_view> names();
  std::string_view name() const { return name_; }
  /// Text up to where the assistant's answer begins; encode with parse_special = true. Throws Error when the family has
  /// no place for a role.
  std::string render(std::span<const ChatMessage> messages, bool add_generation_prompt = true) const;

 private:
  explicit ChatTemplate(std::string_view name) : name_(name) {}
  std::string_view name_;
  std::string default_system_;  // what a ChatML template says where the messages have no system text
};

}  // namespace lacuna
