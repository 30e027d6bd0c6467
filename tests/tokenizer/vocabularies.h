// tests/tokenizer/vocabularies.h - vocabularies for tests: small ones made here, real ones from fixtures and shared
// data.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "io/sentencepiece.h"
#include "io/tokenizer_json.h"
#include "test_support.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/tokenizer.h"

namespace lacuna::test {

/// The 256 byte tokens (id = byte), then what `merges` make, then `control` tokens. Pre-tokenizer GPT-2.
inline Vocabulary small_byte_bpe(std::vector<std::string> merges, const std::vector<std::string>& control = {}) {
  Vocabulary v;
  v.model = Vocabulary::Model::byte_bpe;
  v.pre = "gpt-2";
  v.add_space_prefix = false;
  for (int b = 0; b < 256; ++b) v.tokens.emplace_back(byte_to_letter(static_cast<uint8_t>(b)));
  for (std::string merge : merges) v.tokens.push_back(merge.erase(merge.find(' ', 1), 1));
  v.types.assign(v.tokens.size(), TokenType::normal);
  for (const std::string& token : control) {
    v.tokens.push_back(token);
    v.types.push_back(TokenType::control);
  }
  v.merges = std::move(merges);
  return v;
}

/// <unk> <s> </s>, then the pieces (score = minus the place), then, if asked, the 256 byte tokens.
inline Vocabulary small_sentencepiece(const std::vector<std::string>& pieces, bool bytes) {
  Vocabulary v;
  v.model = Vocabulary::Model::sentencepiece;
  v.tokens = {"<unk>", "<s>", "</s>"};
  v.types = {TokenType::unknown, TokenType::control, TokenType::control};
  v.scores = {0, 0, 0};
  v.unk_id = 0;
  v.bos_id = 1;
  v.eos_id = 2;
  for (const std::string& piece : pieces) {
    v.tokens.push_back(piece);
    v.types.push_back(TokenType::normal);
    v.scores.push_back(-static_cast<float>(v.tokens.size()));
  }
  for (int b = 0; bytes && b < 256; ++b) {
    v.tokens.push_back(fmt::format("<0x{:02X}>", b));
    v.types.push_back(TokenType::byte);
    v.scores.push_back(0);
  }
  return v;
}

inline Vocabulary shared_vocab_and_merges(const std::string& vocab, const std::string& merges, const std::string& pre) {
  Vocabulary v = io::parse_vocab_and_merges(read_text(shared_data() / "tokenizer" / vocab),
                                            read_text(shared_data() / "tokenizer" / merges), vocab);
  v.pre = pre;
  return v;
}

inline void make_control(Vocabulary& v, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) v.types[static_cast<size_t>(id)] = TokenType::control;
}

inline Vocabulary sentencepiece_file(const std::filesystem::path& path) {
  const std::string bytes = read_text(path);
  return io::parse_sentencepiece(std::as_bytes(std::span(bytes)), path.string());
}

/// Qwen2's three files. Fill-in-the-middle, repository and tool tokens are not special, the others are.
inline Vocabulary qwen2_vocabulary() {
  Vocabulary v = shared_vocab_and_merges("qwen2/vocab.json", "qwen2/merges.txt", "qwen2");
  const auto added = nlohmann::json::parse(read_text(shared_data() / "tokenizer/qwen2/added_tokens.json"));
  for (const auto& [text, id] : added.items()) {
    const std::string_view name = text;
    const bool special =
        name.starts_with("<|") && !name.starts_with("<|fim_") && name != "<|repo_name|>" && name != "<|file_sep|>";
    io::add_token(v, {id.get<int64_t>(), text, special}, "added_tokens.json");
  }
  return v;
}

/// The vocabularies of tests/fixtures/tokenizer, by name. Those called tiny_* are there too, others in shared data.
inline Vocabulary fixture_vocabulary(const std::string& name) {
  if (name == "gpt2") {
    Vocabulary v = shared_vocab_and_merges("gpt2/vocab.json", "gpt2/merges.txt", "gpt-2");
    make_control(v, {50256});
    return v;
  }
  if (name == "opt") {
    Vocabulary v = shared_vocab_and_merges("opt/vocab.json", "gpt2/merges.txt", "gpt-2");
    make_control(v, {0, 1, 2, 3});
    return v;
  }
  if (name == "qwen2") {
    Vocabulary v = qwen2_vocabulary();
    v.nfc = true;
    return v;
  }
  if (name == "llama2") return sentencepiece_file(shared_data() / "tokenizer/llama2/tokenizer.model");
  const std::filesystem::path folder =
      name == "docs22m" ? shared_data() / "models/docs22m" : std::filesystem::path(fixture("tokenizer/" + name));
  const std::filesystem::path json = folder / "tokenizer.json";
  if (!std::filesystem::exists(json)) return sentencepiece_file(folder / "tokenizer.model");
  return io::parse_tokenizer_json(read_text(json), json.string());
}

inline std::vector<int32_t> encode_plain(const Tokenizer& tokenizer, std::string_view text,
                                         bool parse_special = false) {
  return tokenizer.encode(text, {.add_special = false, .parse_special = parse_special});
}

}  // namespace lacuna::test
