#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace lacuna {

namespace {
constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Char next = read_utf8(pending_, at);
    if (next.kind == Utf8Char::Kind::incomplete) break;
    out += next.kind == Utf8Char::Kind::valid ? std::string_view(pending_).substr(at, next.length) : kReplacement;
    at += next.length;
  }
  pending_.erase(0, at);
  return out;
}

std::string Utf8Stream::finish() {
  const bool cut = !pending_.empty();  // push() leaves nothing but the beginning of one character
  pending_.clear();
  return cut ? std::string(kReplacement) : std::string();
}

}  // namespace lacuna
