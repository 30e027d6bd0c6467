// src/io/end_of_generation.h - tokens that end an answer by their well-known names.
#pragma once

#include "core/vocabulary.h"

namespace lacuna::io {

/// Adds to eog_ids the control tokens <|im_end|>, <|eot_id|>, <|endoftext|> and their like: a file rarely says that
/// they end an answer, yet chat models end with them.
void add_known_end_tokens(Vocabulary& vocabulary);

}  // namespace lacuna::io
