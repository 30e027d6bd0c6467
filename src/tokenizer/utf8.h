// src/tokenizer/utf8.h - strict UTF-8 (no surrogates, no overlong forms) over text that may hold any bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lacuna {

struct Utf8Char {
  enum class Kind : uint8_t {
    valid,       // a whole character
    incomplete,  // the text ends inside what may still become a character
    invalid,     // can never become one
  };
  Kind kind;
  size_t length;  // bytes; of `invalid`: the longest beginning of a character found there, at least 1
};

/// What stands at text[at]. Requires at < text.size().
Utf8Char read_utf8(std::string_view text, size_t at);

/// Length of the valid UTF-8 that `text` begins with.
size_t valid_utf8_prefix(std::string_view text);

bool is_ascii(std::string_view text);

/// Unicode normalisation form C. Requires valid UTF-8.
std::string to_nfc(std::string_view text);

/// U+2581, which stands for a space in SentencePiece's pieces.
inline constexpr std::string_view kSpaceMark = "\xe2\x96\x81";

std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace lacuna
