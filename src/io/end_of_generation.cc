#include "io/end_of_generation.h"

#include <algorithm>
#include <string_view>

namespace lacuna::io {

namespace {
constexpr std::string_view kNames[] = {"<|im_end|>",      "<|eot_id|>", "<|eom_id|>",    "<|end|>", "<|endoftext|>",
                                       "<|end_of_text|>", "<EOT>",      "<end_of_turn>", "<|EOT|>"};
}

void add_known_end_tokens(Vocabulary& vocabulary) {
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    if (vocabulary.types[i] != TokenType::control) continue;
    if (std::find(std::begin(kNames), std::end(kNames), vocabulary.tokens[i]) == std::end(kNames)) continue;
    const auto id = int32_t(i);
    auto& ids = vocabulary.eog_ids;
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
}

}  // namespace lacuna::io
