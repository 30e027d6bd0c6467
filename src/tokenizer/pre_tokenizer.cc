#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer/pre_tokenizer.h"

#include <fmt/ranges.h>
#include <pcre2.h>

#include <algorithm>

#include "core/error.h"
#include "tokenizer/utf8.h"

namespace lacuna {

namespace {

constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDigit = R"(\p{N})";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt4o =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

const std::vector<PreTokenizerRule>& rules() {
  static const std::vector<PreTokenizerRule> all = {
      // What files without a name were made with: punctuation first, then GPT-2's words, digits three at a time.
      {"default", {R"([\p{P}$+<=>^~|]+)", kGpt2, R"(\p{N}+)", R"([0-9][0-9][0-9])"}},
      {"gpt-2", {kGpt2}},
      {"gpt2", {kGpt2}},
      {"phi-2", {kGpt2}},
      {"opt", {kGpt2}},
      {"mpt", {kGpt2}},
      {"olmo", {kGpt2}},
      {"jais", {kGpt2}},
      {"smollm", {kDigit, kGpt2}},
      {"starcoder", {kDigit, kGpt2}},
      {"refact", {kDigit, kGpt2}},
      {"command-r", {kDigit, kGpt2}},
      {"codeshell", {kDigit, kGpt2}},
      {"exaone", {kDigit, kGpt2}},
      {"minerva-7b", {kDigit, kGpt2}},
      {"falcon", {R"([\p{P}$+<=>^~|`]+)", kGpt2, R"([0-9][0-9][0-9])"}},
      {"llama-bpe", {kLlama3}, true, true},
      {"llama3", {kLlama3}, true, true},
      {"llama-v3", {kLlama3}, true, true},
      {"falcon3", {kLlama3}, true, true},
      {"dbrx", {kLlama3}},
      {"smaug-bpe", {kLlama3}},
      {"chatglm-bpe", {kLlama3}},
      {"glm4", {kLlama3}},
      {"qwen2", {kQwen2}},
      {"stablelm2", {kQwen2}},
      {"deepseek-r1-qwen", {kQwen2}},
      {"qwen35", {kQwen35}},
      {"tekken", {kTekken}, true, true},
      {"gpt-4o", {kGpt4o}},
      {"deepseek-coder", {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)", "[一-龥ࠀ-一가-퟿]+", kDigit}},
      {"deepseek-v3",
       {R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+",
        R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
  };
  return all;
}

/// PCRE2's \s is a little wider than Unicode's White_Space (it takes U+180E), which is what tokenizers mean by it.
std::string with_unicode_spaces(std::string_view regex) {
  std::string out;
  for (size_t i = 0; i < regex.size(); ++i) {
    if (regex[i] != '\\' || i + 1 == regex.size()) {
      out += regex[i];
      continue;
    }
    const char escaped = regex[++i];
    if (escaped == 's') {
      out += R"(\p{White_Space})";
    } else if (escaped == 'S') {
      out += R"(\P{White_Space})";
    } else {
      out += '\\';
      out += escaped;
    }
  }
  return out;
}

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

using MatchData = std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)>;

}  // namespace

const PreTokenizerRule& pre_tokenizer_rule(std::string_view name) {
  const auto rule = std::ranges::find(rules(), name, &PreTokenizerRule::name);
  if (rule != rules().end()) return *rule;
  std::vector<std::string_view> names;
  for (const PreTokenizerRule& known : rules()) names.push_back(known.name);
  throw Error("tokenizer.ggml.pre: unknown pre-tokenizer '{}'; known are {}", name, fmt::join(names, ", "));
}

class PreTokenizer::Regex {
 public:
  explicit Regex(const std::string& source) : source_(source), code_(nullptr, pcre2_code_free) {
    const std::string regex = with_unicode_spaces(source);
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(regex.data()), regex.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
    if (!code_) {
      throw Error("pre-tokenizer regex '{}': {} near '{}'", source, pcre2_message(error),
                  regex.substr(std::min(offset, regex.size()), 20));
    }
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // where there is no JIT, pcre2_match interprets
  }

  void split(std::string_view text, pcre2_match_data* match, std::vector<std::string_view>& out) const {
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match);
    size_t begin = 0;   // of what no piece covers yet
    size_t search = 0;  // where the next match may begin
    while (search < text.size() && find(text, search, match)) {
      if (range[1] == range[0]) {  // an empty match cuts nothing
        if (range[1] >= text.size()) break;
        search = range[1] + read_utf8(text, range[1]).length;
        continue;
      }
      if (range[0] > begin) out.push_back(text.substr(begin, range[0] - begin));
      out.push_back(text.substr(range[0], range[1] - range[0]));
      begin = search = range[1];
    }
    if (begin < text.size()) out.push_back(text.substr(begin));
  }

 private:
  bool find(std::string_view text, size_t from, pcre2_match_data* match) const {
    const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int rc = pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, match, nullptr);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter keeps its stack on the heap
      rc = pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, nullptr);
    }
    if (rc == PCRE2_ERROR_NOMATCH) return false;
    if (rc < 0) {
      throw Error("pre-tokenizer regex '{}' at byte {} of {}: {}", source_, from, text.size(), pcre2_message(rc));
    }
    return true;
  }

  std::string source_;
  std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code_;
};

PreTokenizer::PreTokenizer(std::span<const std::string> regexes) {
  for (const std::string& regex : regexes) regexes_.emplace_back(regex);
}
PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;

std::vector<std::string_view> PreTokenizer::split(std::string_view text) const {
  const MatchData match(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  std::vector<std::string_view> pieces;
  if (!text.empty()) pieces.push_back(text);
  for (const Regex& regex : regexes_) {
    std::vector<std::string_view> finer;
    for (const std::string_view piece : pieces) regex.split(piece, match.get(), finer);
    pieces = std::move(finer);
  }
  return pieces;
}

}  // namespace lacuna
