// Vocabulary <-> tokenizer.ggml.* keys (spec: ggml docs/gguf.md, "Tokenizer"), as llama.cpp reads and writes them. What
// these cannot say stands under lacuna.tokenizer.*, which other programs ignore.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "io/checkpoint.h"

namespace lacuna::io {

namespace {

struct ModelName {
  std::string_view gguf;
  Vocabulary::Model model;
};
constexpr ModelName kModels[] = {{"gpt2", Vocabulary::Model::byte_bpe},
                                 {"llama", Vocabulary::Model::sentencepiece},
                                 {"t5", Vocabulary::Model::unigram}};

// GGUF's numbers from 1 on; 0 is "undefined" and read as normal.
constexpr std::array kTypes = {TokenType::normal,       TokenType::unknown, TokenType::control,
                               TokenType::user_defined, TokenType::unused,  TokenType::byte};

struct IdKey {
  std::string_view key;
  std::optional<int32_t> Vocabulary::*id;
};
constexpr IdKey kIds[] = {{"tokenizer.ggml.bos_token_id", &Vocabulary::bos_id},
                          {"tokenizer.ggml.eos_token_id", &Vocabulary::eos_id},
                          {"tokenizer.ggml.unknown_token_id", &Vocabulary::unk_id},
                          {"tokenizer.ggml.padding_token_id", &Vocabulary::pad_id},
                          {"tokenizer.ggml.eot_token_id", &Vocabulary::eot_id}};

constexpr std::string_view kSplitRegexes = "lacuna.tokenizer.split_regexes";
constexpr std::string_view kIndividualDigits = "lacuna.tokenizer.individual_digits";
constexpr std::string_view kIgnoreMerges = "lacuna.tokenizer.ignore_merges";
constexpr std::string_view kNfc = "lacuna.tokenizer.nfc";
constexpr std::string_view kEogIds = "lacuna.tokenizer.end_of_generation_ids";

Vocabulary::Model read_model(const Metadata& metadata) {
  const auto name = metadata.string("tokenizer.ggml.model");
  if (!name || *name == "no_vocab" || *name == "none") return Vocabulary::Model::none;
  std::string known;
  for (const ModelName& model : kModels) {
    if (model.gguf == *name) return model.model;
    known += fmt::format("{}, ", model.gguf);
  }
  throw Error("metadata key tokenizer.ggml.model: unknown tokenizer \"{}\"; known are {}no_vocab", *name, known);
}

void read_types(const Metadata& metadata, Vocabulary& out) {
  out.types.assign(out.tokens.size(), TokenType::normal);
  const auto types = metadata.integers("tokenizer.ggml.token_type");
  if (!types) return;
  if (types->size() != out.tokens.size())
    throw Error("metadata: {} token types for {} tokens", types->size(), out.tokens.size());
  for (size_t i = 0; i < types->size(); ++i) {
    const int64_t type = (*types)[i];
    if (type < 0 || type > int64_t(kTypes.size()))
      throw Error("metadata key tokenizer.ggml.token_type: token {} has the unknown type {}", i, type);
    if (type > 0) out.types[i] = kTypes[size_t(type - 1)];
  }
}

std::optional<int32_t> read_id(const Metadata& metadata, std::string_view key, size_t n_tokens) {
  const auto id = metadata.integer(key);
  // -1, also as 32 unsigned bits, is how converters say "none".
  if (!id || *id == -1 || *id == std::numeric_limits<uint32_t>::max()) return std::nullopt;
  if (*id < 0 || uint64_t(*id) >= n_tokens)
    throw Error("metadata key {}: id {} is out of range; there are {} tokens", key, *id, n_tokens);
  return int32_t(*id);
}

}  // namespace

Vocabulary vocabulary_from_metadata(const Metadata& metadata) {
  Vocabulary out;
  out.model = read_model(metadata);
  if (out.model == Vocabulary::Model::none) return out;
  const bool bytes = out.model == Vocabulary::Model::byte_bpe;
  if (metadata.contains("tokenizer.ggml.precompiled_charsmap"))
    throw Error(
        "metadata key tokenizer.ggml.precompiled_charsmap: a tokenizer that rewrites characters by a compiled table is "
        "not supported; "
        "its ids would be wrong without it");

  const auto* tokens = metadata.strings("tokenizer.ggml.tokens");
  if (tokens == nullptr) throw Error("metadata key tokenizer.ggml.tokens is missing");
  if (tokens->size() > size_t(std::numeric_limits<int32_t>::max())) throw Error("metadata: more than 2^31 tokens");
  out.tokens = *tokens;
  read_types(metadata, out);
  if (const auto* merges = metadata.strings("tokenizer.ggml.merges")) out.merges = *merges;
  for (size_t i = 0; i < out.merges.size(); ++i)
    if (out.merges[i].find(' ', 1) == std::string::npos)
      throw Error("metadata key tokenizer.ggml.merges: merge {} (\"{}\") is not two parts", i, out.merges[i]);
  if (bytes && !metadata.contains("tokenizer.ggml.merges"))
    throw Error("metadata key tokenizer.ggml.merges is missing");
  if (auto scores = metadata.numbers("tokenizer.ggml.scores"); scores && !bytes) {
    if (scores->size() != out.tokens.size())
      throw Error("metadata: {} token scores for {} tokens", scores->size(), out.tokens.size());
    for (size_t i = 0; i < scores->size(); ++i)
      if (std::isnan((*scores)[i])) throw Error("metadata key tokenizer.ggml.scores: the score of token {} is NaN", i);
    out.scores = *std::move(scores);
  }
  if (!bytes && out.scores.empty() && out.merges.empty()) throw Error("metadata key tokenizer.ggml.scores is missing");

  for (const auto& [key, id] : kIds) out.*id = read_id(metadata, key, out.tokens.size());
  out.add_bos = metadata.boolean("tokenizer.ggml.add_bos_token");
  out.add_eos = metadata.boolean("tokenizer.ggml.add_eos_token");
  out.add_space_prefix = metadata.boolean("tokenizer.ggml.add_space_prefix").value_or(!bytes);
  out.remove_extra_whitespaces = metadata.boolean("tokenizer.ggml.remove_extra_whitespaces").value_or(false);
  out.chat_template = metadata.string("tokenizer.chat_template").value_or("");

  if (bytes) {
    if (const auto* regexes = metadata.strings(kSplitRegexes))
      out.split_regexes = *regexes;
    else
      out.pre = metadata.string("tokenizer.ggml.pre").value_or("default");
  }
  out.individual_digits = metadata.boolean(kIndividualDigits).value_or(false);
  out.ignore_merges = metadata.boolean(kIgnoreMerges).value_or(false);
  out.nfc = metadata.boolean(kNfc).value_or(false);
  for (const int64_t id : metadata.integers(kEogIds).value_or(std::vector<int64_t>())) {
    if (id < 0 || uint64_t(id) >= out.tokens.size())
      throw Error("metadata key {}: id {} is out of range; there are {} tokens", kEogIds, id, out.tokens.size());
    out.eog_ids.push_back(int32_t(id));
  }
  return out;
}

void vocabulary_to_metadata(const Vocabulary& vocabulary, Metadata& metadata) {
  const auto set = [&](std::string_view key, MetadataValue value) { metadata.set(std::string(key), std::move(value)); };
  if (vocabulary.model == Vocabulary::Model::none) {
    set("tokenizer.ggml.model", "no_vocab");
    return;
  }
  const bool bytes = vocabulary.model == Vocabulary::Model::byte_bpe;
  for (const ModelName& model : kModels)
    if (model.model == vocabulary.model) set("tokenizer.ggml.model", std::string(model.gguf));
  // Without a name llama.cpp falls back to its default regexes and says so; it cannot be told others.
  if (bytes && !vocabulary.pre.empty()) set("tokenizer.ggml.pre", vocabulary.pre);
  if (!bytes) set("tokenizer.ggml.pre", "default");
  set("tokenizer.ggml.tokens", vocabulary.tokens);
  if (!vocabulary.scores.empty()) set("tokenizer.ggml.scores", vocabulary.scores);
  std::vector<int32_t> types;
  types.reserve(vocabulary.types.size());
  for (const TokenType type : vocabulary.types)
    types.push_back(int32_t(std::find(kTypes.begin(), kTypes.end(), type) - kTypes.begin()) + 1);
  set("tokenizer.ggml.token_type", std::move(types));
  if (bytes || !vocabulary.merges.empty()) set("tokenizer.ggml.merges", vocabulary.merges);
  for (const auto& [key, id] : kIds)
    if (vocabulary.*id) set(key, uint32_t(*(vocabulary.*id)));
  if (vocabulary.add_bos) set("tokenizer.ggml.add_bos_token", *vocabulary.add_bos);
  if (vocabulary.add_eos) set("tokenizer.ggml.add_eos_token", *vocabulary.add_eos);
  if (!bytes) {
    set("tokenizer.ggml.add_space_prefix", vocabulary.add_space_prefix);
    set("tokenizer.ggml.remove_extra_whitespaces", vocabulary.remove_extra_whitespaces);
  }
  if (!vocabulary.chat_template.empty()) set("tokenizer.chat_template", vocabulary.chat_template);

  if (bytes && vocabulary.pre.empty()) set(kSplitRegexes, vocabulary.split_regexes);
  if (vocabulary.individual_digits) set(kIndividualDigits, true);
  if (vocabulary.ignore_merges) set(kIgnoreMerges, true);
  if (vocabulary.nfc) set(kNfc, true);
  if (!vocabulary.eog_ids.empty()) set(kEogIds, vocabulary.eog_ids);
}

}  // namespace lacuna::io
