// src/tokenizer/text_model.h - what differs between kinds of vocabularies: ordinary text to ids, one id to bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/vocabulary.h"
#include "tokenizer/merge.h"

namespace lacuna {

class TextModel {
 public:
  virtual ~TextModel() = default;
  /// Appends the ids of text that holds no special tokens; it may hold any bytes. `after_special`: it stands at the
  /// beginning or behind a special token.
  virtual void encode(std::string_view text, bool after_special, std::vector<int32_t>& out) const = 0;
  /// The bytes of an ordinary (or user-defined, or byte) token.
  virtual std::string bytes(int32_t id) const = 0;
};

/// Both keep a reference to the vocabulary and throw Error for one that cannot work.
std::unique_ptr<TextModel> make_byte_bpe(const Vocabulary& vocabulary);
std::unique_ptr<TextModel> make_sentencepiece(const Vocabulary& vocabulary);

using TokenIds = std::unordered_map<std::string_view, int32_t>;

/// Every token's id by its text; of tokens with the same text the first counts.
TokenIds token_ids(const Vocabulary& vocabulary);

/// The pairs of tokens that merge, by rank.
class MergeTable {
 public:
  /// Throws Error for a merge without its space or of texts that are no tokens.
  MergeTable(const std::vector<std::string>& merges, const TokenIds& ids);
  bool empty() const { return merges_.empty(); }
  Merge find(int32_t left, int32_t right) const {
    const auto it = merges_.find(key(left, right));
    return it == merges_.end() ? Merge{} : it->second;
  }

 private:
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  struct Hash {
    size_t operator()(uint64_t pair) const {
      pair *= 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
      return static_cast<size_t>(pair ^ pair >> 32);
    }
  };
  std::unordered_map<uint64_t, Merge, Hash> merges_;
};

/// The ids of words already seen in one text; words are views that outlive it.
class WordCache {
 public:
  /// Appends the word's ids to `out`; encode(word, out) makes them the first time.
  template <class Encode>
  void append(std::string_view word, std::vector<int32_t>& out, Encode&& encode) {
    const auto [it, is_new] = ranges_.try_emplace(word);
    if (is_new) {
      const size_t begin = ids_.size();
      encode(word, ids_);
      it->second = {begin, ids_.size()};
    }
    out.insert(out.end(), ids_.begin() + static_cast<ptrdiff_t>(it->second.first),
               ids_.begin() + static_cast<ptrdiff_t>(it->second.second));
  }

 private:
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> ranges_;
  std::vector<int32_t> ids_;
};

}  // namespace lacuna
