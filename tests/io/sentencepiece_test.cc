#include "io/sentencepiece.h"

#include "core/rng.h"
#include "gguf_bytes.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using test::Bytes;

Vocabulary parse(std::string_view bytes) { return parse_sentencepiece(test::as_span(bytes), "t.model"); }

std::string field(int number, std::string_view bytes) {
  return Bytes().number(uint8_t(number << 3 | 2)).number(uint8_t(bytes.size())).raw(bytes).text();
}
std::string varint_field(int number, uint8_t value) {
  if (number < 16) return Bytes().number(uint8_t(number << 3)).number(value).text();
  return Bytes().number(uint8_t((number << 3 & 0x7f) | 0x80)).number(uint8_t(number >> 4)).number(value).text();
}
std::string piece(std::string_view text, float score, uint8_t type) {
  return field(1, field(1, text) + Bytes().number(uint8_t(2 << 3 | 5)).number(score).text() + varint_field(3, type));
}
const std::string kPieces =
    piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3) + piece("<0x41>", 0, 6) + piece("a", -1, 1);

TEST(SentencePiece, HandMadeModel) {
  const Vocabulary v = parse(kPieces + field(2, varint_field(3, 2) + varint_field(40, 0) + varint_field(41, 2)) +
                             field(3, field(1, "identity") + varint_field(3, 0) + varint_field(4, 0)));
  EXPECT_EQ(v.model, Vocabulary::Model::sentencepiece);
  EXPECT_EQ(v.tokens, (std::vector<std::string>{"<unk>", "<s>", "</s>", "<0x41>", "a"}));
  EXPECT_EQ(v.types, (std::vector<TokenType>{TokenType::unknown, TokenType::control, TokenType::control,
                                             TokenType::byte, TokenType::normal}));
  EXPECT_EQ(v.scores[4], -1.0f);
  EXPECT_EQ(v.unk_id, 0);
  EXPECT_EQ(v.bos_id, 2);
  EXPECT_EQ(v.eos_id, 2);
  EXPECT_EQ(v.pad_id, std::nullopt);
  EXPECT_FALSE(v.add_space_prefix);
  EXPECT_FALSE(v.remove_extra_whitespaces);
}

TEST(SentencePiece, DefaultsOfTheFormat) {
  const Vocabulary v = parse(kPieces);
  EXPECT_EQ(v.model, Vocabulary::Model::unigram);
  EXPECT_TRUE(v.add_space_prefix);
  EXPECT_TRUE(v.remove_extra_whitespaces);
  EXPECT_EQ(v.bos_id, 1);
}

TEST(SentencePiece, WhatItRefuses) {
  EXPECT_ERROR(parse(""), "it has no pieces");
  EXPECT_ERROR(parse("hello world"), "t.model: ");
  EXPECT_ERROR(parse(kPieces + field(2, varint_field(3, 3))), "model type 3 is not supported");
  EXPECT_ERROR(parse(kPieces + field(3, field(2, "charsmap"))), "character map is not supported");
  EXPECT_ERROR(parse(kPieces + field(3, varint_field(5, 0))), "escape_whitespaces");
  EXPECT_ERROR(parse(piece("a", 0, 7)), "piece 0 has the unknown type 7");
  EXPECT_ERROR(parse(piece("", 0, 1)), "piece 0 is empty");
  EXPECT_ERROR(parse(piece("a", NAN, 1)), "no number as score");
  EXPECT_ERROR(parse(kPieces + field(2, varint_field(41, 99))), "a special id 99 of 5 pieces");
  EXPECT_ERROR(parse(kPieces + varint_field(1, 1)), "field 1 has wire type 0, expected 2");
  EXPECT_ERROR(parse(kPieces + std::string(12, '\xff')), "longer than 10 bytes");
  EXPECT_ERROR(parse(kPieces + "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), "cut short");
  EXPECT_ERROR(parse(kPieces + "\x0b"), "wire type 3");
  EXPECT_ERROR(parse(std::string("\0\1", 2)), "field of number 0");
}

TEST(SentencePiece, Llama2) {
  LACUNA_NEED_SHARED("tokenizer/llama2/tokenizer.model");
  const Vocabulary v = parse(test::read_text(test::shared_data() / "tokenizer/llama2/tokenizer.model"));
  EXPECT_EQ(v.model, Vocabulary::Model::sentencepiece);
  ASSERT_EQ(v.tokens.size(), 32000u);
  EXPECT_EQ(v.types[0], TokenType::unknown);
  EXPECT_EQ(v.types[3], TokenType::byte);
  EXPECT_EQ(v.tokens[3], "<0x00>");
  EXPECT_EQ(v.bos_id, 1);
  EXPECT_EQ(v.eos_id, 2);
  EXPECT_TRUE(v.add_space_prefix);
  EXPECT_FALSE(v.remove_extra_whitespaces);
}

TEST(SentencePiece, CutsAndDamage) {
  const std::string whole = test::read_text(test::fixture("tokenizer/tiny_spm/tokenizer.model"));
  ASSERT_EQ(parse(whole).tokens.size(), 500u);
  EXPECT_EQ(parse(test::read_text(test::fixture("tokenizer/tiny_unigram/tokenizer.model"))).model,
            Vocabulary::Model::unigram);
  EXPECT_ERROR(parse(std::string_view(whole).substr(0, whole.size() - 1)), "cut short");
  Rng rng(3);
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = whole.substr(0, 1 + rng.below(whole.size()));
    damaged[rng.below(damaged.size())] = char(rng.next());
    try {
      parse(damaged);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace lacuna::io
