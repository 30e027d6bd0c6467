#include "tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace lacuna {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Words = std::vector<std::string>;

Words split(const std::vector<std::string>& regexes, std::string_view text) {
  const PreTokenizer pre_tokenizer(regexes);
  const auto words = pre_tokenizer.split(text);
  return {words.begin(), words.end()};
}

Words split_as(std::string_view name, std::string_view text) {
  const auto& regexes = pre_tokenizer_rule(name).regexes;
  return split({regexes.begin(), regexes.end()}, text);
}

TEST(PreTokenizer, Gpt2) {
  EXPECT_THAT(split_as("gpt-2", "I'll pay 123 now!!  \n ok"),
              ElementsAre("I", "'ll", " pay", " 123", " now", "!!", "  \n", " ok"));
  EXPECT_THAT(split_as("gpt-2", "I'LL"), ElementsAre("I", "'", "LL"));
  EXPECT_THAT(split_as("gpt-2", "a  "), ElementsAre("a", "  "));
  EXPECT_THAT(split_as("gpt-2", ""), ElementsAre());
}

TEST(PreTokenizer, SmollmCutsDigitsFirst) {
  EXPECT_THAT(split_as("smollm", "in 2024  x"), ElementsAre("in", " ", "2", "0", "2", "4", " ", " x"));
}

TEST(PreTokenizer, Qwen2AndLlama3DifferInDigits) {
  EXPECT_THAT(split_as("qwen2", "It'S 12345\n\n x"),
              ElementsAre("It", "'S", " ", "1", "2", "3", "4", "5", "\n\n", " x"));
  EXPECT_THAT(split_as("llama-bpe", "It'S 12345\n\n x"), ElementsAre("It", "'S", " ", "123", "45", "\n\n", " x"));
}

TEST(PreTokenizer, TekkenCutsWhereCaseRises) {
  EXPECT_THAT(split_as("tekken", "fooBarBAZ 42/"), ElementsAre("foo", "Bar", "BAZ", " ", "4", "2", "/"));
}

TEST(PreTokenizer, FalconAndDefaultCutDigitsByThree) {
  EXPECT_THAT(split_as("falcon", "a,12345"), ElementsAre("a", ",", "123", "45"));
  EXPECT_THAT(split_as("default", "a 12345"), ElementsAre("a", " ", "123", "45"));
}

TEST(PreTokenizer, SpaceIsUnicodesWhiteSpace) {
  // U+0085 and U+3000 are white space, U+180E no longer is.
  EXPECT_THAT(split({R"(\s+)"}, "a\u0085\u3000b\u180ec"), ElementsAre("a", "\u0085\u3000", "b\u180ec"));
  EXPECT_THAT(split({R"([^\s]+)"}, "a\u0085\u3000b\u180ec"), ElementsAre("a", "\u0085\u3000", "b\u180ec"));
  EXPECT_THAT(split({R"(\\s)"}, "a\\s s"), ElementsAre("a", "\\s", " s"));
}

TEST(PreTokenizer, EachRegexSeesOnlyItsPiece) {
  // The second one's look-ahead ends with the piece, not with the text.
  EXPECT_THAT(split({R"(\p{N})", R"(\s+(?!\S))"}, "a  5"), ElementsAre("a", "  ", "5"));
}

TEST(PreTokenizer, EmptyMatchesCutNothing) {
  EXPECT_THAT(split({"x*"}, "a\u00e9xxb"), ElementsAre("a\u00e9", "xx", "b"));
  EXPECT_THAT(split({"(?=b)"}, "abc"), ElementsAre("abc"));
}

TEST(PreTokenizer, WordsTogetherAreTheText) {
  const std::string text = "Na\u00efve 12\u00bd \u4f60\u597d!?\r\n\t\tend \U0001f680  '";
  for (const std::string_view name : {"default", "gpt-2", "smollm", "falcon", "llama-bpe", "qwen2", "qwen35", "tekken",
                                      "gpt-4o", "deepseek-coder", "deepseek-v3"}) {
    std::string joined;
    for (const std::string& word : split_as(name, text)) joined += word;
    EXPECT_EQ(joined, text) << name;
  }
}

TEST(PreTokenizer, LongTextNeedsNoStack) {
  // A group under a star: the compiled form's stack overflows and the interpreter takes over.
  const std::string text(1 << 20, 'a');
  EXPECT_THAT(split({"(?:a|b)+"}, text), ElementsAre(text));
}

TEST(PreTokenizer, UnknownNameListsTheKnown) {
  EXPECT_THAT([] { pre_tokenizer_rule("gpt-17"); },
              ThrowsMessage<Error>(testing::AllOf(HasSubstr("'gpt-17'"), HasSubstr("qwen2"), HasSubstr("smollm"))));
}

TEST(PreTokenizer, BadRegexSaysWhere) {
  EXPECT_THAT([] { split({"a(b"}, ""); }, ThrowsMessage<Error>(HasSubstr("'a(b'")));
  EXPECT_THAT([] { split({"\\C"}, ""); }, ThrowsMessage<Error>(HasSubstr("\\C")));
}

}  // namespace
}  // namespace lacuna
