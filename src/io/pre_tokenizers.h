// src/io/pre_tokenizers.h - which regexes of a tokenizer.json are a pre-tokenizer that GGUF has a name for.
#pragma once

#include <string>
#include <string_view>

#include "core/vocabulary.h"

namespace lacuna::io {

/// GPT-2's regex: what tokenizer.json's ByteLevel with use_regex splits by.
extern const std::string_view kGpt2Regex;

/// Where split_regexes, individual_digits and ignore_merges of a byte_bpe vocabulary are exactly those of a family,
/// sets `pre` to its name, which then stands for all three, and clears them; otherwise leaves the vocabulary as it is.
void name_pre_tokenizer(Vocabulary& vocabulary);

}  // namespace lacuna::io
