#include "core/error.h"
#include "tokenizer/text_model.h"

namespace lacuna {

TokenIds token_ids(const Vocabulary& vocabulary) {
  TokenIds ids;
  ids.reserve(vocabulary.tokens.size());
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    ids.try_emplace(vocabulary.tokens[id], static_cast<int32_t>(id));
  }
  return ids;
}

MergeTable::MergeTable(const std::vector<std::string>& merges, const TokenIds& ids) {
  merges_.reserve(merges.size());
  std::string joined;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string_view merge = merges[rank];
    const size_t space = merge.find(' ', 1);  // the left text may begin with a space
    if (space == std::string_view::npos || space + 1 == merge.size()) {
      throw Error("tokenizer merge {}: expected two texts with a space between them, got '{}'", rank, merge);
    }
    const std::string_view left = merge.substr(0, space);
    const std::string_view right = merge.substr(space + 1);
    joined.assign(left).append(right);
    const auto id_of = [&](std::string_view text) {
      const auto it = ids.find(text);
      if (it == ids.end()) {
        throw Error("tokenizer merge {}: '{}' needs the token '{}', which the vocabulary lacks", rank, merge, text);
      }
      return it->second;
    };
    const int32_t left_id = id_of(left);
    const int32_t right_id = id_of(right);
    merges_.try_emplace(key(left_id, right_id), Merge{static_cast<double>(rank), id_of(joined)});
  }
}

}  // namespace lacuna
