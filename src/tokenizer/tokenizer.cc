#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <unordered_set>

#include "core/error.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/special_tokens.h"
#include "tokenizer/text_model.h"

namespace lacuna {

namespace {

using Model = Vocabulary::Model;

/// Control tokens that end an answer in the families that have them, whatever the file says about EOS.
constexpr std::string_view kEndTexts[] = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|endoftext|>",
    "<|end|>",    "</s>",       "<eos>",      "<|EOT|>",         "<EOT>",         "<|end_of_turn|>",
};

void check_id(const std::optional<int32_t>& id, std::string_view what, size_t n_tokens) {
  if (id && (*id < 0 || static_cast<size_t>(*id) >= n_tokens)) {
    throw Error("tokenizer: {} id {} lies outside the vocabulary of {} tokens", what, *id, n_tokens);
  }
}

Vocabulary checked(Vocabulary vocabulary) {
  if (vocabulary.model == Model::none) {
    throw Error(
        "the model holds no tokenizer; put tokenizer.json or tokenizer.model beside it, or use a GGUF that has one");
  }
  const size_t n = vocabulary.tokens.size();
  if (n == 0) throw Error("tokenizer: the vocabulary has no tokens");
  if (vocabulary.types.size() != n) {
    throw Error("tokenizer: {} tokens but {} token types", n, vocabulary.types.size());
  }
  check_id(vocabulary.bos_id, "BOS", n);
  check_id(vocabulary.eos_id, "EOS", n);
  check_id(vocabulary.unk_id, "unknown token", n);
  check_id(vocabulary.pad_id, "padding token", n);
  check_id(vocabulary.eot_id, "EOT", n);
  for (const int32_t id : vocabulary.eog_ids) check_id(id, "end of generation", n);
  return vocabulary;
}

bool adds_bos_by_default(const Vocabulary& vocabulary) {
  if (vocabulary.model == Model::sentencepiece) return true;
  return vocabulary.split_regexes.empty() && !vocabulary.pre.empty() && pre_tokenizer_rule(vocabulary.pre).add_bos;
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(Vocabulary v)
      : vocabulary(checked(std::move(v))),
        specials(vocabulary),
        model(vocabulary.model == Model::byte_bpe ? make_byte_bpe(vocabulary) : make_sentencepiece(vocabulary)),
        adds_bos(vocabulary.bos_id && vocabulary.add_bos.value_or(adds_bos_by_default(vocabulary))),
        adds_eos(vocabulary.eos_id && vocabulary.add_eos.value_or(false)),
        ends(vocabulary.eog_ids.begin(), vocabulary.eog_ids.end()) {
    if (vocabulary.eos_id) ends.insert(*vocabulary.eos_id);
    if (vocabulary.eot_id) ends.insert(*vocabulary.eot_id);
    for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
      if (vocabulary.types[id] == TokenType::control && std::ranges::count(kEndTexts, vocabulary.tokens[id]) > 0) {
        ends.insert(static_cast<int32_t>(id));
      }
    }
  }

  TokenType type(int32_t id) const {
    if (id < 0 || static_cast<size_t>(id) >= vocabulary.tokens.size()) {
      throw Error("token {} lies outside the vocabulary of {} tokens", id, vocabulary.tokens.size());
    }
    return vocabulary.types[static_cast<size_t>(id)];
  }

  Vocabulary vocabulary;
  SpecialTokens specials;
  std::unique_ptr<TextModel> model;
  bool adds_bos;
  bool adds_eos;
  std::unordered_set<int32_t> ends;
};

Tokenizer::Tokenizer(Vocabulary vocabulary) : impl_(std::make_unique<Impl>(std::move(vocabulary))) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> ids;
  bool after_special = true;
  for (const SpecialTokens::Part& part : impl_->specials.split(text, options.parse_special)) {
    if (part.id >= 0) {
      ids.push_back(part.id);
    } else {
      impl_->model->encode(part.text, after_special, ids);
    }
    after_special = part.id >= 0;
  }
  if (!options.add_special) return ids;
  if (impl_->adds_bos && (ids.empty() || ids.front() != bos())) ids.insert(ids.begin(), bos());
  if (options.add_eos && impl_->adds_eos && (ids.size() <= (impl_->adds_bos ? 1 : 0) || ids.back() != eos()))
    ids.push_back(eos());
  return ids;
}

std::string Tokenizer::piece(int32_t id, bool special) const {
  const TokenType type = impl_->type(id);
  if (type == TokenType::control || type == TokenType::unknown || type == TokenType::unused) {
    return special ? impl_->vocabulary.tokens[static_cast<size_t>(id)] : std::string();
  }
  return impl_->model->bytes(id);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool special) const {
  const Vocabulary& vocabulary = impl_->vocabulary;
  bool at_start = vocabulary.model != Model::byte_bpe && vocabulary.add_space_prefix;
  std::string text;
  for (const int32_t id : ids) {
    const std::string bytes = piece(id, special);
    const bool drop = at_start && impl_->type(id) == TokenType::normal && bytes.starts_with(' ');
    text.append(bytes, drop ? 1 : 0);
    if (impl_->type(id) != TokenType::control) at_start = false;
  }
  return text;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->vocabulary.tokens.size()); }
bool Tokenizer::adds_bos() const { return impl_->adds_bos; }
bool Tokenizer::adds_eos() const { return impl_->adds_eos; }
int32_t Tokenizer::bos() const { return impl_->vocabulary.bos_id.value_or(-1); }
int32_t Tokenizer::eos() const { return impl_->vocabulary.eos_id.value_or(-1); }
bool Tokenizer::ends_generation(int32_t id) const { return impl_->ends.contains(id); }
const Vocabulary& Tokenizer::vocabulary() const { return impl_->vocabulary; }

}  // namespace lacuna
