// src/tokenizer/special_tokens.h - finds control and user-defined tokens written in a text.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/vocabulary.h"

namespace lacuna {

class SpecialTokens {
 public:
  explicit SpecialTokens(const Vocabulary& vocabulary);

  struct Part {
    std::string_view text;
    int32_t id = -1;  // -1: ordinary text
  };
  /// Cuts the text at user-defined tokens and, if asked, at control and unknown ones: leftmost first, of several at one
  /// place the longest.
  std::vector<Part> split(std::string_view text, bool parse_special) const;

 private:
  struct Token {
    std::string text;
    int32_t id;
    bool always;
  };
  std::array<std::vector<Token>, 256> by_first_byte_;  // longest first
};

}  // namespace lacuna
