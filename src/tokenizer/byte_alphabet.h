// src/tokenizer/byte_alphabet.h - GPT-2's alphabet: one printable character for each of the 256 bytes.
// Printable Latin-1 bytes (33..126, 161..172, 174..255) stand for themselves; the other 68 bytes, in ascending order,
// are U+0100, U+0101, ... So a space is U+0120.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lacuna {

/// UTF-8 of the character that stands for `byte`.
std::string_view byte_to_letter(uint8_t byte);

/// The bytes that `letters` stand for; nothing if a character lies outside the alphabet.
std::optional<std::string> letters_to_bytes(std::string_view letters);

}  // namespace lacuna
