#include "tokenizer/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/error.h"

namespace lacuna {

Utf8Char read_utf8(std::string_view text, size_t at) {
  using Kind = Utf8Char::Kind;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return {Kind::valid, 1};
  // The second byte's range carries every rule: overlong forms, surrogates and the end at U+10FFFF.
  size_t length = 0;
  uint8_t low = 0x80;
  uint8_t high = 0xbf;
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return {Kind::invalid, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return {Kind::incomplete, i};
    if (byte(at + i) < low || byte(at + i) > high) return {Kind::invalid, i};
    low = 0x80;
    high = 0xbf;
  }
  return {Kind::valid, length};
}

size_t valid_utf8_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Char next = read_utf8(text, at);
    if (next.kind != Utf8Char::Kind::valid) break;
    at += next.length;
  }
  return at;
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0x80; });
}

std::string to_nfc(std::string_view text) {
  if (is_ascii(text)) return std::string(text);
  utf8proc_uint8_t* normalised = nullptr;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  const utf8proc_ssize_t length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                               static_cast<utf8proc_ssize_t>(text.size()), &normalised, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(normalised, std::free);
  if (length < 0) throw Error("normalising {} bytes of text to NFC: {}", text.size(), utf8proc_errmsg(length));
  return {reinterpret_cast<const char*>(normalised), static_cast<size_t>(length)};
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size());
  size_t at = 0;
  for (size_t hit = text.find(from); hit != std::string_view::npos; hit = text.find(from, at)) {
    out.append(text, at, hit - at).append(to);
    at = hit + from.size();
  }
  return out.append(text, at);
}

}  // namespace lacuna
