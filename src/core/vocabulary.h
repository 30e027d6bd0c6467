// src/core/vocabulary.h - a tokenizer's data, free of any file format: io fills it, tokenizer uses it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lacuna {

enum class TokenType : uint8_t { normal, unknown, control, user_defined, unused, byte };

/// Everything that turns text into ids and back. Token ids are indices of `tokens`.
struct Vocabulary {
  enum class Model : uint8_t {
    none,           // no tokenizer in the file
    byte_bpe,       // byte-level BPE (GPT-2 alphabet), merges by rank
    sentencepiece,  // SentencePiece-type BPE: merges by score, U+2581 for space, byte fallback
    unigram,        // SentencePiece unigram
  };
  Model model = Model::none;
  /// Name of the pre-tokenizer, as in GGUF's tokenizer.ggml.pre ("gpt-2", "llama-bpe", "qwen2", "smollm", ...); empty
  /// when split_regexes rule.
  std::string pre;
  /// Pre-tokenizer regexes from a tokenizer.json, applied one after the other (each splits what the one before left);
  /// empty: use `pre`.
  std::vector<std::string> split_regexes;
  /// Digits are cut singly before anything else (tokenizer.json: Digits individual_digits).
  bool individual_digits = false;
  bool nfc = false;                 // normalise to NFC first (Qwen2)
  bool ignore_merges = false;       // a pre-token that is itself a token is taken whole (Llama 3)
  std::vector<std::string> tokens;  // byte_bpe: in the GPT-2 byte alphabet; sentencepiece: with U+2581
  std::vector<float> scores;        // sentencepiece, unigram
  std::vector<TokenType> types;     // same length as tokens
  /// "left right", by rank. byte_bpe: always. sentencepiece: from a tokenizer.json only; where filled, merges are
  /// ranked by it and `scores` do not count.
  std::vector<std::string> merges;
  bool add_space_prefix = true;  // sentencepiece: a space before the text
  bool remove_extra_whitespaces = false;
  std::optional<bool> add_bos,
      add_eos;  // as the file says; absent: the model kind's rule (sentencepiece adds BOS, byte_bpe does not)
  std::optional<int32_t> bos_id, eos_id, unk_id, pad_id, eot_id;
  std::vector<int32_t> eog_ids;  // further ids that end a generation (from generation_config.json)
  std::string chat_template;     // Jinja text, empty when the file has none
};

}  // namespace lacuna
