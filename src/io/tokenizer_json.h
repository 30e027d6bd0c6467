// src/io/tokenizer_json.h - tokenizer.json of Hugging Face tokenizers, and the older pair vocab.json + merges.txt.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "core/vocabulary.h"

namespace lacuna::io {

/// Reads byte-level BPE, SentencePiece-type BPE (byte fallback; U+2581 for space) and Unigram. Throws Error (starting
/// with `where`) for any other model, normalizer, pre-tokenizer or option: they would change ids.
Vocabulary parse_tokenizer_json(std::string_view text, const std::string& where);

/// GPT-2's two files: {token: id} and "left right" lines, an optional first line "#version". `pre` stays empty.
Vocabulary parse_vocab_and_merges(std::string_view vocab_json, std::string_view merges, const std::string& where);

/// A token that a side file adds.
struct AddedToken {
  int64_t id = 0;
  std::string content;
  bool special = false;
};
/// Puts it at its id: beyond the end (gaps become unused tokens), or where the same text stands already. Error
/// otherwise.
void add_token(Vocabulary& vocabulary, const AddedToken& token, const std::string& where);

/// Fills up to `size` tokens with unused ones named [PADn], as llama.cpp's converter does.
void pad_tokens(Vocabulary& vocabulary, int64_t size);

}  // namespace lacuna::io
