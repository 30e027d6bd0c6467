// src/io/sentencepiece.h - SentencePiece's tokenizer.model, a protocol buffer (sentencepiece_model.proto), read by
// hand.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/vocabulary.h"

namespace lacuna::io {

/// Reads BPE and unigram models. Throws Error (starting with `where`) for damaged bytes, word and char models, and text
/// normalisation by a character map.
Vocabulary parse_sentencepiece(std::span<const std::byte> file, const std::string& where);

}  // namespace lacuna::io
