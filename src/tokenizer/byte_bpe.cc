// Byte-level BPE: words of the pre-tokenizer, each merged from its bytes by rank.
#include <array>

#include "core/error.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/text_model.h"
#include "tokenizer/utf8.h"

namespace lacuna {

namespace {

std::vector<std::string> pre_tokenizer_regexes(const Vocabulary& vocabulary) {
  std::vector<std::string> regexes;
  if (vocabulary.individual_digits) regexes.emplace_back(R"(\p{N})");
  if (!vocabulary.split_regexes.empty()) {
    regexes.insert(regexes.end(), vocabulary.split_regexes.begin(), vocabulary.split_regexes.end());
  } else {
    const PreTokenizerRule& rule = pre_tokenizer_rule(vocabulary.pre.empty() ? "default" : vocabulary.pre);
    regexes.insert(regexes.end(), rule.regexes.begin(), rule.regexes.end());
  }
  return regexes;
}

class ByteBpe final : public TextModel {
 public:
  explicit ByteBpe(const Vocabulary& vocabulary)
      : vocabulary_(vocabulary),
        ids_(token_ids(vocabulary)),
        merges_(vocabulary.merges, ids_),
        pre_tokenizer_(pre_tokenizer_regexes(vocabulary)),
        ignore_merges_(vocabulary.ignore_merges || (vocabulary.split_regexes.empty() && !vocabulary.pre.empty() &&
                                                    pre_tokenizer_rule(vocabulary.pre).ignore_merges)) {
    // As in llama.cpp and Hugging Face's tokenizers: a byte that the vocabulary lacks vanishes, unless the model itself
    // names a token for the unknown (then that token has the type; a configuration's unk_token does not count).
    const bool has_unknown = vocabulary.unk_id && vocabulary.types[size_t(*vocabulary.unk_id)] == TokenType::unknown;
    const int32_t unknown = has_unknown ? *vocabulary.unk_id : -1;
    bool any = false;
    for (size_t b = 0; b < byte_ids_.size(); ++b) {
      const auto it = ids_.find(byte_to_letter(static_cast<uint8_t>(b)));
      byte_ids_[b] = it != ids_.end() ? it->second : unknown;
      any |= it != ids_.end();
    }
    if (!any) throw Error("tokenizer: a byte-level vocabulary of {} tokens without a token for any byte", ids_.size());
  }

  void encode(std::string_view text, bool, std::vector<int32_t>& out) const override {
    while (!text.empty()) {
      const size_t valid = valid_utf8_prefix(text);
      if (valid > 0) encode_valid(text.substr(0, valid), out);
      text.remove_prefix(valid);
      if (text.empty()) break;
      const size_t invalid = read_utf8(text, 0).length;
      for (const char c : text.substr(0, invalid)) append_byte(c, out);
      text.remove_prefix(invalid);
    }
  }

  std::string bytes(int32_t id) const override {
    const std::string& token = vocabulary_.tokens[static_cast<size_t>(id)];
    if (vocabulary_.types[static_cast<size_t>(id)] == TokenType::user_defined) return token;
    return letters_to_bytes(token).value_or(token);
  }

 private:
  void encode_valid(std::string_view text, std::vector<int32_t>& out) const {
    std::string normalised;
    if (vocabulary_.nfc && !is_ascii(text)) text = normalised = to_nfc(text);
    WordCache cache;
    for (const std::string_view word : pre_tokenizer_.split(text)) {
      cache.append(word, out, [this](std::string_view w, std::vector<int32_t>& ids) { encode_word(w, ids); });
    }
  }

  void encode_word(std::string_view word, std::vector<int32_t>& out) const {
    if (ignore_merges_) {
      std::string letters;
      for (const char c : word) letters += byte_to_letter(static_cast<uint8_t>(c));
      const auto whole = ids_.find(letters);
      if (whole != ids_.end() && vocabulary_.types[static_cast<size_t>(whole->second)] == TokenType::normal) {
        out.push_back(whole->second);
        return;
      }
    }
    std::vector<Symbol> symbols(word.size());
    for (uint32_t i = 0; i < symbols.size(); ++i) symbols[i] = {byte_ids_[static_cast<uint8_t>(word[i])], i, 1};
    merge_symbols(symbols, [this](const Symbol& l, const Symbol& r) { return merges_.find(l.id, r.id); });
    for (const Symbol& symbol : symbols) {
      if (symbol.id >= 0) out.push_back(symbol.id);
    }
  }

  void append_byte(char c, std::vector<int32_t>& out) const {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id >= 0) out.push_back(id);
  }

  const Vocabulary& vocabulary_;
  TokenIds ids_;
  MergeTable merges_;
  PreTokenizer pre_tokenizer_;
  bool ignore_merges_;
  std::array<int32_t, 256> byte_ids_{};
};

}  // namespace

std::unique_ptr<TextModel> make_byte_bpe(const Vocabulary& vocabulary) { return std::make_unique<ByteBpe>(vocabulary); }

}  // namespace lacuna
