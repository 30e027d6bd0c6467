#include "io/pre_tokenizers.h"

namespace lacuna::io {

const std::string_view kGpt2Regex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

struct Family {
  std::string_view pre;
  std::string_view regex;
  bool individual_digits;
  bool ignore_merges;
};
const Family kFamilies[] = {
    {"gpt-2", kGpt2Regex, false, false},
    {"smollm", kGpt2Regex, true, false},
    {"llama-bpe",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     false, true},
    {"qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     false, false}};

}  // namespace

void name_pre_tokenizer(Vocabulary& vocabulary) {
  if (vocabulary.split_regexes.size() != 1) return;
  for (const Family& family : kFamilies) {
    if (vocabulary.split_regexes[0] != family.regex || vocabulary.individual_digits != family.individual_digits ||
        vocabulary.ignore_merges != family.ignore_merges)
      continue;
    vocabulary.pre = family.pre;
    vocabulary.split_regexes.clear();
    vocabulary.individual_digits = vocabulary.ignore_merges = false;
    return;
  }
}

}  // namespace lacuna::io
