// SentencePiece models. BPE: characters merged into the known piece of highest score, or by a list of merges where the
// vocabulary has one (what tokenizer.json holds). Unigram: the pieces with the largest sum of scores. What stays
// unknown falls back to bytes, else to the unknown token.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "tokenizer/text_model.h"
#include "tokenizer/utf8.h"

namespace lacuna {

namespace {

TokenIds piece_ids(const Vocabulary& vocabulary) {
  TokenIds ids;
  ids.reserve(vocabulary.tokens.size());
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const TokenType type = vocabulary.types[id];  // control, byte and unused pieces never come from text
    if (type != TokenType::normal && type != TokenType::user_defined) continue;
    ids.try_emplace(vocabulary.tokens[id], static_cast<int32_t>(id));
  }
  return ids;
}

/// "<0x0A>" -> 10; -1 for anything else.
int byte_of(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return -1;
  int value = 0;
  for (const char c : piece.substr(3, 2)) {
    const size_t digit = std::string_view("0123456789ABCDEF").find(c);
    if (digit == std::string_view::npos) return -1;
    value = value * 16 + static_cast<int>(digit);
  }
  return value;
}

class SentencePiece final : public TextModel {
 public:
  explicit SentencePiece(const Vocabulary& vocabulary)
      : vocabulary_(vocabulary), ids_(piece_ids(vocabulary)), merges_(vocabulary.merges, token_ids(vocabulary)) {
    if ((merges_.empty() || vocabulary.model == Vocabulary::Model::unigram) &&
        vocabulary.scores.size() != vocabulary.tokens.size()) {
      throw Error("tokenizer: {} tokens but {} scores", vocabulary.tokens.size(), vocabulary.scores.size());
    }
    byte_ids_.fill(-1);
    for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
      if (vocabulary.types[id] != TokenType::byte) continue;
      const int byte = byte_of(vocabulary.tokens[id]);
      if (byte < 0) throw Error("tokenizer: byte token {}: expected <0xXX>, got '{}'", id, vocabulary.tokens[id]);
      byte_ids_[static_cast<size_t>(byte)] = static_cast<int32_t>(id);
    }
    if (vocabulary.model == Vocabulary::Model::unigram) set_unigram_scores();
    const bool all_bytes = std::ranges::find(byte_ids_, -1) == byte_ids_.end();
    if (!all_bytes && !vocabulary.unk_id) {
      throw Error(
          "tokenizer: the vocabulary has neither an unknown token nor all 256 byte tokens, so some text has no ids");
    }
    for (const auto& [text, id] : ids_) {
      longest_ = std::max(longest_, text.size());
      for (size_t mark = text.find(kSpaceMark, 1); mark != std::string_view::npos;
           mark = text.find(kSpaceMark, mark + 1)) {
        if (!text.substr(0, mark).ends_with(kSpaceMark)) words_stand_alone_ = false;
      }
    }
  }

  void encode(std::string_view text, bool after_special, std::vector<int32_t>& out) const override {
    const std::string marked = normalise(text, after_special && vocabulary_.add_space_prefix);
    WordCache cache;
    const auto encode_one = [this](std::string_view w, std::vector<int32_t>& ids) { encode_word(w, ids); };
    std::string_view rest = marked;
    while (!rest.empty()) {
      const size_t end = words_stand_alone_ ? word_end(rest) : rest.size();
      cache.append(rest.substr(0, end), out, encode_one);
      rest.remove_prefix(end);
    }
  }

  std::string bytes(int32_t id) const override {
    const std::string& token = vocabulary_.tokens[static_cast<size_t>(id)];
    if (vocabulary_.types[static_cast<size_t>(id)] == TokenType::byte) return {static_cast<char>(byte_of(token))};
    return replace_all(token, kSpaceMark, " ");
  }

 private:
  std::string normalise(std::string_view text, bool space_prefix) const {
    std::string spaced;
    if (vocabulary_.remove_extra_whitespaces) {
      for (const char c : text) {
        if (c != ' ' || (!spaced.empty() && spaced.back() != ' ')) spaced += c;
      }
      if (spaced.ends_with(' ')) spaced.pop_back();
    } else {
      spaced = text;
    }
    if (space_prefix && !spaced.empty()) spaced.insert(0, 1, ' ');
    return replace_all(spaced, " ", kSpaceMark);
  }

  /// No piece has a space mark behind another character, so no merge crosses such a place.
  static size_t word_end(std::string_view text) {
    size_t letter = 0;
    while (text.substr(letter).starts_with(kSpaceMark)) letter += kSpaceMark.size();
    const size_t end = text.find(kSpaceMark, letter);
    return end == std::string_view::npos ? text.size() : end;
  }

  void encode_word(std::string_view word, std::vector<int32_t>& out) const {
    std::vector<Symbol> symbols = characters(word);
    if (vocabulary_.model == Vocabulary::Model::unigram) {
      symbols = best_pieces(word, symbols);
    } else if (merges_.empty()) {
      merge_symbols(symbols, [&](const Symbol& l, const Symbol& r) { return merge_by_score(word, l, r); });
    } else {
      merge_symbols(symbols, [&](const Symbol& l, const Symbol& r) { return merges_.find(l.id, r.id); });
    }
    bool previous_unknown = false;
    for (const Symbol& symbol : symbols) {
      const bool unknown = symbol.id < 0 && !append_bytes(word.substr(symbol.begin, symbol.length), out);
      if (symbol.id >= 0) out.push_back(symbol.id);
      if (unknown && !previous_unknown) out.push_back(*vocabulary_.unk_id);  // a run of unknown ones is one
      previous_unknown = unknown;
    }
  }

  std::vector<Symbol> characters(std::string_view word) const {
    std::vector<Symbol> symbols;
    for (size_t at = 0; at < word.size();) {
      const Utf8Char next = read_utf8(word, at);
      const size_t length = next.kind == Utf8Char::Kind::valid ? next.length : 1;
      symbols.push_back({id_of(word.substr(at, length)), static_cast<uint32_t>(at), static_cast<uint32_t>(length)});
      at += length;
    }
    return symbols;
  }

  /// Viterbi over the characters' boundaries; of equal sums the one whose last piece is longest.
  std::vector<Symbol> best_pieces(std::string_view word, const std::vector<Symbol>& characters) const {
    struct Best {
      double score = -std::numeric_limits<double>::infinity();
      size_t first = 0;  // character where the last piece begins
      int32_t id = -1;
    };
    std::vector<Best> best(characters.size() + 1);  // of the word's first n characters
    best[0].score = 0;
    for (size_t first = 0; first < characters.size(); ++first) {
      const size_t begin = characters[first].begin;
      for (size_t last = first; last < characters.size(); ++last) {
        const size_t length = characters[last].begin + characters[last].length - begin;
        if (length > longest_ && last > first) break;
        const int32_t id = id_of(word.substr(begin, length));
        if (id < 0 && last > first) continue;
        const double score = best[first].score + (id < 0 ? unknown_score_ : unigram_score(id, length));
        if (score > best[last + 1].score) best[last + 1] = {score, first, id};
      }
    }
    std::vector<Symbol> pieces;
    for (size_t end = characters.size(); end > 0; end = best[end].first) {
      const uint32_t begin = characters[best[end].first].begin;
      const Symbol& last = characters[end - 1];
      pieces.push_back({best[end].id, begin, last.begin + last.length - begin});
    }
    std::ranges::reverse(pieces);
    return pieces;
  }

  /// User-defined pieces win over any others of the same length, unknown characters lose (SentencePiece's figures).
  double unigram_score(int32_t id, size_t length) const {
    if (vocabulary_.types[static_cast<size_t>(id)] == TokenType::user_defined) {
      return static_cast<double>(length) * largest_score_ - 0.1;
    }
    return vocabulary_.scores[static_cast<size_t>(id)];
  }

  void set_unigram_scores() {
    double smallest = std::numeric_limits<double>::max();
    largest_score_ = std::numeric_limits<double>::lowest();
    for (const auto& [text, id] : ids_) {
      const double score = vocabulary_.scores[static_cast<size_t>(id)];
      if (!std::isfinite(score)) throw Error("tokenizer: piece {} ('{}') has the score {}", id, text, score);
      if (vocabulary_.types[static_cast<size_t>(id)] != TokenType::normal) continue;
      smallest = std::min(smallest, score);
      largest_score_ = std::max(largest_score_, score);
    }
    unknown_score_ = smallest - 10;
  }

  Merge merge_by_score(std::string_view word, const Symbol& left, const Symbol& right) const {
    const size_t length = size_t{left.length} + right.length;
    if (length > longest_) return {};
    const int32_t id = id_of(word.substr(left.begin, length));
    if (id < 0) return {};
    return {-static_cast<double>(vocabulary_.scores[static_cast<size_t>(id)]), id};
  }

  int32_t id_of(std::string_view text) const {
    const auto it = ids_.find(text);
    return it == ids_.end() ? -1 : it->second;
  }

  /// False, and nothing appended, if a byte has no token.
  bool append_bytes(std::string_view text, std::vector<int32_t>& out) const {
    const auto id = [this](char c) { return byte_ids_[static_cast<uint8_t>(c)]; };
    if (std::ranges::any_of(text, [&](char c) { return id(c) < 0; })) return false;
    for (const char c : text) out.push_back(id(c));
    return true;
  }

  const Vocabulary& vocabulary_;
  TokenIds ids_;
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_{};
  size_t longest_ = 0;  // bytes of the longest piece
  double unknown_score_ = 0;
  double largest_score_ = 0;
  bool words_stand_alone_ = true;  // see word_end
};

}  // namespace

std::unique_ptr<TextModel> make_sentencepiece(const Vocabulary& vocabulary) {
  return std::make_unique<SentencePiece>(vocabulary);
}

}  // namespace lacuna
