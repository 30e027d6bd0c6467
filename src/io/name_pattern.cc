#define PCRE2_CODE_UNIT_WIDTH 8
#include "io/name_pattern.h"

#include <pcre2.h>

#include "core/error.h"

namespace lacuna::io {

namespace {

constexpr uint32_t kMostSteps = 100'000;
constexpr size_t kLongest = 10'000;  // bytes of an expression

std::string message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace

NamePattern::NamePattern(std::string_view regex, const std::string& where) : regex_(regex), where_(where) {
  if (regex.size() > kLongest)
    throw Error("{}: a regular expression of {} bytes; at most {} are read", where, regex.size(), kLongest);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(units(regex_), regex_.size(), PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code == nullptr) throw Error("{}: regular expression '{}': {}", where, regex, message(error));
  code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
}

bool NamePattern::matches(std::string_view name) const {
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(
      pcre2_match_context_create(nullptr), pcre2_match_context_free);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(pcre2_match_data_create(1, nullptr),
                                                                                  pcre2_match_data_free);
  pcre2_set_match_limit(context.get(), kMostSteps);
  const int found = pcre2_match(static_cast<const pcre2_code*>(code_.get()), units(name), name.size(), 0,
                                PCRE2_ANCHORED, match.get(), context.get());
  if (found >= 0) return true;
  if (found == PCRE2_ERROR_NOMATCH) return false;
  throw Error("{}: regular expression '{}' on '{}': {}", where_, regex_, name, message(found));
}

}  // namespace lacuna::io
