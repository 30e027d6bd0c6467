#include <cmath>
#include <limits>

#include "gguf_bytes.h"
#include "io/checkpoint.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

Vocabulary byte_bpe() {
  Vocabulary v;
  v.model = Vocabulary::Model::byte_bpe;
  v.pre = "qwen2";
  v.nfc = true;
  v.tokens = {"a", "b", "ab", "<|im_end|>", "[PAD4]"};
  v.types = {TokenType::normal, TokenType::normal, TokenType::user_defined, TokenType::control, TokenType::unused};
  v.merges = {"a b"};
  v.add_space_prefix = false;
  v.add_bos = false;
  v.bos_id = 2;
  v.eos_id = 3;
  v.eot_id = 3;
  v.pad_id = 4;
  v.eog_ids = {2, 3};
  v.chat_template = "{{ messages }}";
  return v;
}
Vocabulary sentencepiece() {
  Vocabulary v;
  v.model = Vocabulary::Model::sentencepiece;
  v.tokens = {"<unk>", "<0x00>", "a"};
  v.types = {TokenType::unknown, TokenType::byte, TokenType::normal};
  v.scores = {0, 0, -1.5f};
  v.add_space_prefix = false;
  v.remove_extra_whitespaces = true;
  v.unk_id = 0;
  v.add_eos = true;
  return v;
}

void expect_equal(const Vocabulary& a, const Vocabulary& b) {
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.pre, b.pre);
  EXPECT_EQ(a.split_regexes, b.split_regexes);
  EXPECT_EQ(a.individual_digits, b.individual_digits);
  EXPECT_EQ(a.nfc, b.nfc);
  EXPECT_EQ(a.ignore_merges, b.ignore_merges);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.scores, b.scores);
  EXPECT_EQ(a.types, b.types);
  EXPECT_EQ(a.merges, b.merges);
  EXPECT_EQ(a.add_space_prefix, b.add_space_prefix);
  EXPECT_EQ(a.remove_extra_whitespaces, b.remove_extra_whitespaces);
  EXPECT_EQ(a.add_bos, b.add_bos);
  EXPECT_EQ(a.add_eos, b.add_eos);
  EXPECT_EQ(a.bos_id, b.bos_id);
  EXPECT_EQ(a.eos_id, b.eos_id);
  EXPECT_EQ(a.unk_id, b.unk_id);
  EXPECT_EQ(a.pad_id, b.pad_id);
  EXPECT_EQ(a.eot_id, b.eot_id);
  EXPECT_EQ(a.eog_ids, b.eog_ids);
  EXPECT_EQ(a.chat_template, b.chat_template);
}
void expect_round_trip(const Vocabulary& v) {
  Metadata m;
  vocabulary_to_metadata(v, m);
  expect_equal(vocabulary_from_metadata(m), v);
}

TEST(VocabularyMetadata, RoundTrips) {
  expect_round_trip(Vocabulary());
  expect_round_trip(byte_bpe());
  expect_round_trip(sentencepiece());
  Vocabulary own = byte_bpe();
  own.pre = "";
  own.split_regexes = {"x+", "y"};
  own.individual_digits = own.ignore_merges = true;
  expect_round_trip(own);
  Vocabulary merged = sentencepiece();
  merged.merges = {"a a"};
  expect_round_trip(merged);
  Vocabulary unigram = sentencepiece();
  unigram.model = Vocabulary::Model::unigram;
  expect_round_trip(unigram);
}

TEST(VocabularyMetadata, WritesTheKeysThatOthersRead) {
  Metadata m;
  vocabulary_to_metadata(byte_bpe(), m);
  EXPECT_EQ(m.string("tokenizer.ggml.model"), "gpt2");
  EXPECT_EQ(m.string("tokenizer.ggml.pre"), "qwen2");
  EXPECT_EQ(m.strings("tokenizer.ggml.merges")->at(0), "a b");
  EXPECT_EQ(m.integers("tokenizer.ggml.token_type"), (std::vector<int64_t>{1, 1, 4, 3, 5}));
  EXPECT_EQ(m.integer("tokenizer.ggml.eos_token_id"), 3);
  EXPECT_EQ(m.boolean("tokenizer.ggml.add_bos_token"), false);
  EXPECT_FALSE(m.contains("tokenizer.ggml.add_eos_token"));
  EXPECT_FALSE(m.contains("tokenizer.ggml.scores"));
  EXPECT_EQ(m.string("tokenizer.chat_template"), "{{ messages }}");
  Metadata s;
  vocabulary_to_metadata(sentencepiece(), s);
  EXPECT_EQ(s.string("tokenizer.ggml.model"), "llama");
  EXPECT_EQ(s.numbers("tokenizer.ggml.scores"), (std::vector<float>{0, 0, -1.5f}));
  EXPECT_EQ(s.integers("tokenizer.ggml.token_type"), (std::vector<int64_t>{2, 6, 1}));
}

TEST(VocabularyMetadata, RefusesContradictions) {
  const auto changed = [](const Vocabulary& v, std::string_view key, std::optional<MetadataValue> value) {
    Metadata m;
    vocabulary_to_metadata(v, m);
    if (value)
      m.set(std::string(key), *value);
    else
      m.erase(key);
    return vocabulary_from_metadata(m);
  };
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.model", std::string("bert")),
               "unknown tokenizer \"bert\"; known are gpt2, llama, t5, no_vocab");
  EXPECT_ERROR(changed(sentencepiece(), "tokenizer.ggml.precompiled_charsmap", std::vector<uint8_t>{1}),
               "precompiled_charsmap: a tokenizer that rewrites");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.tokens", std::nullopt), "tokens is missing");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.merges", std::nullopt), "merges is missing");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.merges", std::vector<std::string>{"ab"}),
               "merge 0 (\"ab\") is not two parts");
  EXPECT_ERROR(changed(sentencepiece(), "tokenizer.ggml.scores", std::nullopt), "scores is missing");
  EXPECT_ERROR(changed(sentencepiece(), "tokenizer.ggml.scores", std::vector<float>{1}), "1 token scores for 3 tokens");
  EXPECT_ERROR(changed(sentencepiece(), "tokenizer.ggml.scores", std::vector<float>{0, NAN, 0}),
               "the score of token 1 is NaN");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.token_type", std::vector<int32_t>{1}), "1 token types for 5 tokens");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.token_type", std::vector<int32_t>{1, 1, 1, 1, 9}),
               "token 4 has the unknown type 9");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.eos_token_id", uint32_t{5}),
               "eos_token_id: id 5 is out of range; there are 5 tokens");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.bos_token_id", int32_t{-2}), "id -2 is out of range");
  EXPECT_ERROR(changed(byte_bpe(), "lacuna.tokenizer.end_of_generation_ids", std::vector<int32_t>{7}),
               "id 7 is out of range");
  EXPECT_ERROR(changed(byte_bpe(), "tokenizer.ggml.tokens", std::vector<int32_t>{7}), "expected an array of strings");
  EXPECT_EQ(changed(byte_bpe(), "tokenizer.ggml.bos_token_id", std::numeric_limits<uint32_t>::max()).bos_id,
            std::nullopt);
  EXPECT_EQ(changed(byte_bpe(), "tokenizer.ggml.pre", std::nullopt).pre, "default");
}

TEST(VocabularyMetadata, FilesOfLlamaCpp) {
  LACUNA_NEED_SHARED("tokenizer/llama.cpp/ggml-vocab-llama-spm.gguf");
  const auto folder = test::shared_data() / "tokenizer/llama.cpp";
  const Checkpoint spm = Checkpoint::open(folder / "ggml-vocab-llama-spm.gguf");
  EXPECT_TRUE(spm.tensors().empty());
  EXPECT_EQ(spm.vocabulary().model, Vocabulary::Model::sentencepiece);
  EXPECT_EQ(spm.vocabulary().tokens.size(), 32000u);
  EXPECT_EQ(spm.vocabulary().bos_id, 1);
  EXPECT_TRUE(spm.vocabulary().add_space_prefix);
  const Checkpoint gpt2 = Checkpoint::open(folder / "ggml-vocab-gpt-2.gguf");
  EXPECT_EQ(gpt2.vocabulary().model, Vocabulary::Model::byte_bpe);
  EXPECT_EQ(gpt2.vocabulary().pre, "gpt-2");
  EXPECT_EQ(gpt2.vocabulary().merges.size(), 50000u);
  const Checkpoint phi = Checkpoint::open(folder / "ggml-vocab-phi-3.gguf");
  EXPECT_EQ(phi.vocabulary().tokens.size(), 32064u);
  for (const Checkpoint* checkpoint : {&spm, &gpt2, &phi}) expect_round_trip(checkpoint->vocabulary());
}

}  // namespace
}  // namespace lacuna::io
