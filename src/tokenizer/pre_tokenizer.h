// src/tokenizer/pre_tokenizer.h - cuts text into the words that byte-level BPE merges within.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lacuna {

/// A pre-tokenizer known by the name that GGUF files give it in tokenizer.ggml.pre.
struct PreTokenizerRule {
  std::string_view name;
  std::vector<std::string_view> regexes;
  bool ignore_merges = false;  // a word that is itself a token is taken whole
  bool add_bos = false;        // where the file does not say
};

/// Throws Error that lists the known names.
const PreTokenizerRule& pre_tokenizer_rule(std::string_view name);

/// Regexes applied one after the other: each cuts every piece that the one before left into its matches and what lies
/// between them. Thread-safe.
class PreTokenizer {
 public:
  /// Throws Error for a regex that does not compile.
  explicit PreTokenizer(std::span<const std::string> regexes);
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;

  /// The words of `text` in order; together they are the text. Requires valid UTF-8.
  std::vector<std::string_view> split(std::string_view text) const;

 private:
  class Regex;
  std::vector<Regex> regexes_;
};

}  // namespace lacuna
