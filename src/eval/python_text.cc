#include "eval/python_text.h"

#include <utf8proc.h>

#include <algorithm>

namespace lacuna::eval {
namespace {

bool is_space(int32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool continues(char c) { return (uint8_t(c) & 0xc0) == 0x80; }

/// The character that begins at text[at], and its bytes.
struct Char {
  int32_t code;
  size_t length;
};
Char char_at(std::string_view text, size_t at) {
  utf8proc_int32_t code = -1;
  const utf8proc_ssize_t length = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at),
                                                   utf8proc_ssize_t(text.size() - at), &code);
  return {code, size_t(std::max<utf8proc_ssize_t>(1, length))};
}

void append(std::string& out, int32_t code) {
  utf8proc_uint8_t bytes[4];
  out.append(reinterpret_cast<const char*>(bytes), size_t(utf8proc_encode_char(code, bytes)));
}

}  // namespace

std::string_view strip_end(std::string_view text) {
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && continues(text[begin])) --begin;
    if (!is_space(char_at(text, begin).code)) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::string_view strip(std::string_view text) {
  text = strip_end(text);
  while (!text.empty()) {
    const Char first = char_at(text, 0);
    if (!is_space(first.code)) break;
    text.remove_prefix(first.length);
  }
  return text;
}

std::string capitalize(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Char c = char_at(text, at);
    append(out, at == 0 ? utf8proc_totitle(c.code) : utf8proc_tolower(c.code));
    at += c.length;
  }
  return out;
}

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return !continues(c); });
}

}  // namespace lacuna::eval
