#include "tokenizer/special_tokens.h"

#include <algorithm>

#include "tokenizer/utf8.h"

namespace lacuna {

SpecialTokens::SpecialTokens(const Vocabulary& vocabulary) {
  const bool space_marks = vocabulary.model != Vocabulary::Model::byte_bpe;
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const TokenType type = vocabulary.types[id];
    const bool always = type == TokenType::user_defined;
    if (!always && type != TokenType::control && type != TokenType::unknown) continue;
    std::string text = vocabulary.tokens[id];
    if (always && space_marks) text = replace_all(text, kSpaceMark, " ");
    if (text.empty()) continue;
    const auto first = static_cast<uint8_t>(text[0]);
    by_first_byte_[first].push_back({std::move(text), static_cast<int32_t>(id), always});
  }
  for (std::vector<Token>& tokens : by_first_byte_) {
    std::ranges::stable_sort(tokens, [](const Token& a, const Token& b) { return a.text.size() > b.text.size(); });
  }
}

std::vector<SpecialTokens::Part> SpecialTokens::split(std::string_view text, bool parse_special) const {
  std::vector<Part> parts;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    const auto& tokens = by_first_byte_[static_cast<uint8_t>(rest[0])];
    const auto hit = std::ranges::find_if(
        tokens, [&](const Token& t) { return (t.always || parse_special) && rest.starts_with(t.text); });
    if (hit == tokens.end()) {
      ++at;
      continue;
    }
    if (at > begin) parts.push_back({text.substr(begin, at - begin)});
    parts.push_back({rest.substr(0, hit->text.size()), hit->id});
    begin = at += hit->text.size();
  }
  if (begin < text.size()) parts.push_back({text.substr(begin)});
  return parts;
}

}  // namespace lacuna
