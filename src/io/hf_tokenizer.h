// src/io/hf_tokenizer.h - the tokenizer files of a Hugging Face folder, put together.
#pragma once

#include <string>

#include "core/vocabulary.h"
#include "io/hf_config.h"

namespace lacuna::io {

/// tokenizer.json, else tokenizer.model, else vocab.json + merges.txt; then added_tokens.json, tokenizer_config.json,
/// chat_template.jinja, and the ids of generation_config.json and config.json (config_text). Filled up to the model's
/// vocabulary size. Model::none where the folder has no tokenizer.
Vocabulary read_hf_tokenizer(const std::string& folder, const HfConfig& config, const std::string& config_text);

/// A whole file as text. Throws Error when it cannot be read.
std::string read_file(const std::string& path);

}  // namespace lacuna::io
