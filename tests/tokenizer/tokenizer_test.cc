#include "tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <limits>
#include <random>

#include "core/error.h"
#include "tokenizer/utf8.h"
#include "tokenizer/vocabularies.h"

namespace lacuna {
namespace {

using test::encode_plain;
using test::small_byte_bpe;
using test::small_sentencepiece;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Ids = std::vector<int32_t>;

constexpr Tokenizer::EncodeOptions kWithSpecial{.add_special = true, .parse_special = true};

TEST(ByteBpe, MergesByRankWithinWords) {
  const Tokenizer t(small_byte_bpe({"a b", "b c", "ab c"}));
  EXPECT_THAT(encode_plain(t, "abc bc"), ElementsAre(258, ' ', 257));
  EXPECT_EQ(t.piece(258), "abc");
}

TEST(ByteBpe, IgnoreMergesTakesAWholeWord) {
  Vocabulary v = small_byte_bpe({});
  v.tokens.push_back("dog");
  v.types.push_back(TokenType::normal);
  EXPECT_THAT(encode_plain(Tokenizer(v), "dog"), ElementsAre('d', 'o', 'g'));
  v.ignore_merges = true;
  EXPECT_THAT(encode_plain(Tokenizer(v), "dog"), ElementsAre(256));
  v.ignore_merges = false;
  v.pre = "llama-bpe";  // the name says it
  EXPECT_THAT(encode_plain(Tokenizer(v), "dog"), ElementsAre(256));
  v.types.back() = TokenType::control;  // but text never becomes a control token
  EXPECT_THAT(encode_plain(Tokenizer(v), "dog"), ElementsAre('d', 'o', 'g'));
}

TEST(ByteBpe, InvalidUtf8GoesByteByByte) {
  const Tokenizer t(small_byte_bpe({"a b"}));
  EXPECT_THAT(encode_plain(t,
                           "ab\xff\xe2\x82"
                           "ab\xf0"),
              ElementsAre(256, 0xff, 0xe2, 0x82, 256, 0xf0));
}

TEST(ByteBpe, ByteThatTheVocabularyLacksIsUnknownOrLeftOut) {
  Vocabulary v = small_byte_bpe({});
  v.tokens['x'] = "[gone]";
  EXPECT_THAT(encode_plain(Tokenizer(v), "axb"), ElementsAre('a', 'b'));
  v.unk_id = 'x';  // what a GGUF file or a tokenizer_config.json names, often the token that ends a text
  v.types['x'] = TokenType::control;
  EXPECT_THAT(encode_plain(Tokenizer(v), "axb"), ElementsAre('a', 'b'));
  v.types['x'] = TokenType::unknown;  // what tokenizer.json's BPE model names
  EXPECT_THAT(encode_plain(Tokenizer(v), "axb"), ElementsAre('a', 'x', 'b'));
}

TEST(ByteBpe, NormalisesOnlyWhereTheVocabularySaysSo) {
  Vocabulary v = small_byte_bpe({});
  EXPECT_EQ(encode_plain(Tokenizer(v), "e\u0301").size(), 3u);
  v.nfc = true;
  EXPECT_THAT(encode_plain(Tokenizer(v), "e\u0301"), ElementsAre(0xc3, 0xa9));
}

TEST(ByteBpe, SplitRegexesRuleInsteadOfPre) {
  Vocabulary v = small_byte_bpe({"a 1", "1 2"});
  v.pre = "no such name";
  v.split_regexes = {R"(\p{L}+|\p{N}+)"};
  EXPECT_THAT(encode_plain(Tokenizer(v), "a12"), ElementsAre('a', 257));
  v.individual_digits = true;
  EXPECT_THAT(encode_plain(Tokenizer(v), "a12"), ElementsAre('a', '1', '2'));
}

TEST(SentencePiece, MergesTheBestScoreAndFallsBackToBytes) {
  const Tokenizer t(small_sentencepiece({"\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"}, true));
  EXPECT_THAT(encode_plain(t, "ab"), ElementsAre(8));  // U+2581 a (better than a b), then b
  EXPECT_THAT(encode_plain(t, "ab ba"), ElementsAre(8, 3, 5, 4));
  EXPECT_THAT(encode_plain(t, "\u00e9"), ElementsAre(3, 9 + 0xc3, 9 + 0xa9));
  EXPECT_THAT(encode_plain(t, "\xff"), ElementsAre(3, 9 + 0xff));
  EXPECT_THAT(encode_plain(t, ""), ElementsAre());
}

TEST(SentencePiece, ARunOfUnknownCharactersIsOneToken) {
  const Tokenizer t(small_sentencepiece({"\u2581", "a"}, false));
  EXPECT_THAT(encode_plain(t, "xyaz\xff"), ElementsAre(3, 0, 4, 0));
}

TEST(SentencePiece, PiecesAcrossWordsAreFound) {
  const Tokenizer t(small_sentencepiece({"\u2581", "a", "a\u2581", "a\u2581a"}, true));
  EXPECT_THAT(encode_plain(t, "a a"), ElementsAre(3, 6));
}

TEST(SentencePiece, SpacesFollowTheVocabularysRules) {
  Vocabulary v = small_sentencepiece({"\u2581", "a"}, true);
  v.remove_extra_whitespaces = true;
  EXPECT_THAT(encode_plain(Tokenizer(v), "  a   a  "), ElementsAre(3, 4, 3, 4));
  v.add_space_prefix = false;
  EXPECT_THAT(encode_plain(Tokenizer(v), " a a"), ElementsAre(4, 3, 4));
  v.remove_extra_whitespaces = false;
  EXPECT_THAT(encode_plain(Tokenizer(v), " a"), ElementsAre(3, 4));
}

TEST(SentencePiece, DecodeDropsTheSpaceThatEncodePutsInFront) {
  const Tokenizer t(small_sentencepiece({"\u2581", "a"}, true));
  EXPECT_EQ(t.decode(t.encode("a a")), "a a");
  EXPECT_EQ(t.decode(t.encode("  a")), "  a");
  EXPECT_EQ(t.decode(Ids{1, 3, 4}, true), "<s>a");
  EXPECT_EQ(t.piece(3), " ");
}

TEST(Unigram, TakesTheLargestSumOfScores) {
  Vocabulary v = small_sentencepiece({"\u2581", "a", "b", "ab", "abb"}, true);
  v.model = Vocabulary::Model::unigram;
  v.scores = {0, 0, 0, -1, -2, -2, -3, -9};
  v.scores.resize(v.tokens.size(), 0);
  EXPECT_THAT(encode_plain(Tokenizer(v), "abb"), ElementsAre(3, 6, 5));
  v.scores[7] = -4;
  EXPECT_THAT(encode_plain(Tokenizer(v), "abb"), ElementsAre(3, 7));
}

TEST(SpecialTokens, AreTextUnlessAskedFor) {
  Vocabulary v = small_byte_bpe({}, {"<|x|>", "<|x|>y", "<|"});
  const Tokenizer t(v);
  EXPECT_THAT(encode_plain(t, "<|"), ElementsAre('<', '|'));
  EXPECT_THAT(encode_plain(t, "a<|x|>b", true), ElementsAre('a', 256, 'b'));
  EXPECT_THAT(encode_plain(t, "<|x|>y<|x|", true), ElementsAre(257, 258, 'x', '|'));  // the longest at a place
  v.types[257] = TokenType::user_defined;
  EXPECT_THAT(encode_plain(Tokenizer(v), "<|x|>y<|x|>"), ElementsAre(257, '<', '|', 'x', '|', '>'));
}

TEST(SpecialTokens, AreHiddenUnlessAskedFor) {
  const Tokenizer t(small_byte_bpe({}, {"<|x|>"}));
  EXPECT_EQ(t.decode(Ids{'a', 256, 'b'}), "ab");
  EXPECT_EQ(t.decode(Ids{'a', 256, 'b'}, true), "a<|x|>b");
  EXPECT_EQ(t.piece(256), "");
}

TEST(SpecialTokens, SpacePrefixComesBackAfterOne) {
  const Tokenizer t(small_sentencepiece({"\u2581", "a"}, true));
  EXPECT_THAT(encode_plain(t, "a</s>a", true), ElementsAre(3, 4, 2, 3, 4));
}

// RECIPES 26
TEST(Bos, ATextThatBeginsWithItGetsNoSecond) {
  const Tokenizer t(small_sentencepiece({"\u2581", "a"}, true));
  EXPECT_TRUE(t.adds_bos());
  EXPECT_THAT(t.encode("a"), ElementsAre(1, 3, 4));
  EXPECT_THAT(t.encode("<s>a", kWithSpecial), ElementsAre(1, 3, 4));
  EXPECT_THAT(t.encode("<s><s>a", kWithSpecial), ElementsAre(1, 1, 3, 4));  // what the text says twice stays
  EXPECT_EQ(t.encode("<s>a").front(), 1);                                   // here it is text: BOS comes before it
  EXPECT_GT(t.encode("<s>a").size(), 3u);
  EXPECT_THAT(t.encode(""), ElementsAre(1));
}

TEST(Bos, AModelWithoutOneNeverGetsOne) {
  Vocabulary v = small_sentencepiece({"\u2581", "a"}, true);
  v.bos_id.reset();
  v.add_bos = true;
  const Tokenizer t(v);
  EXPECT_FALSE(t.adds_bos());
  EXPECT_EQ(t.bos(), -1);
  EXPECT_THAT(t.encode("a"), ElementsAre(3, 4));
}

TEST(Bos, TheFileRulesThenTheKindOfModel) {
  Vocabulary v = small_byte_bpe({}, {"<b>"});
  v.bos_id = 256;
  EXPECT_FALSE(Tokenizer(v).adds_bos());
  v.add_bos = true;
  EXPECT_TRUE(Tokenizer(v).adds_bos());
  v.add_bos.reset();
  v.pre = "llama-bpe";
  EXPECT_TRUE(Tokenizer(v).adds_bos());
  v.add_bos = false;
  EXPECT_FALSE(Tokenizer(v).adds_bos());
  Vocabulary s = small_sentencepiece({"a"}, true);
  s.add_bos = false;
  EXPECT_FALSE(Tokenizer(s).adds_bos());
}

TEST(Eos, IsAddedOnceWhereTheFileSaysSo) {
  Vocabulary v = small_sentencepiece({"\u2581", "a"}, true);
  EXPECT_FALSE(Tokenizer(v).adds_eos());
  v.add_eos = true;
  const Tokenizer t(v);
  EXPECT_THAT(t.encode("a"), ElementsAre(1, 3, 4, 2));
  EXPECT_THAT(t.encode("a</s>", kWithSpecial), ElementsAre(1, 3, 4, 2));
  EXPECT_THAT(t.encode(""), ElementsAre(1, 2));
  v.eos_id = v.bos_id;  // one token for both
  EXPECT_THAT(Tokenizer(v).encode(""), ElementsAre(1, 1));
}

TEST(EndsGeneration, EosEotListedAndWellKnownControlTokens) {
  Vocabulary v = small_byte_bpe({}, {"<eos>", "<eot>", "<listed>", "<|im_end|>", "<other>", "<EOT>"});
  v.eos_id = 256;
  v.eot_id = 257;
  v.eog_ids = {258};
  const Tokenizer t(v);
  for (const int32_t id : {256, 257, 258, 259, 261}) EXPECT_TRUE(t.ends_generation(id)) << id;
  EXPECT_FALSE(t.ends_generation(260));
  EXPECT_FALSE(t.ends_generation('a'));
  v.types[259] = TokenType::user_defined;
  EXPECT_FALSE(Tokenizer(v).ends_generation(259));
}

TEST(Tokenizer, RefusesVocabulariesThatCannotWork) {
  const auto refused = [](Vocabulary v, const char* message) {
    EXPECT_THAT([&] { Tokenizer t(v); }, ThrowsMessage<Error>(HasSubstr(message)));
  };
  refused(Vocabulary{}, "holds no tokenizer");
  Vocabulary v = small_byte_bpe({"a b"});
  v.types.pop_back();
  refused(v, "257 tokens but 256 token types");
  v = small_byte_bpe({});
  v.bos_id = 256;
  refused(v, "BOS id 256");
  v = small_byte_bpe({});
  v.eog_ids = {-1};
  refused(v, "end of generation id -1");
  v = small_byte_bpe({});
  v.pre = "nonsense";
  refused(v, "known are default, gpt-2");
  v = small_byte_bpe({});
  v.merges = {"ab"};
  refused(v, "merge 0");
  v.merges = {"a b"};
  refused(v, "needs the token 'ab'");
  v = small_byte_bpe({});
  v.tokens.assign(256, "none");
  refused(v, "without a token for any byte");
  v = small_sentencepiece({"a"}, true);
  v.scores.pop_back();
  refused(v, "scores");
  v = small_sentencepiece({"a"}, true);
  v.tokens.back() = "<0xGG>";
  refused(v, "expected <0xXX>");
  v = small_sentencepiece({"a"}, false);
  v.unk_id.reset();
  refused(v, "neither an unknown token nor all 256 byte tokens");
}

TEST(Tokenizer, RefusesIdsOutsideTheVocabulary) {
  const Tokenizer t(small_byte_bpe({}));
  EXPECT_THROW(t.piece(-1), Error);
  EXPECT_THROW(t.piece(256), Error);
  EXPECT_FALSE(t.ends_generation(-1));
}

std::string random_text(std::mt19937& rng, bool valid) {
  static const std::string kCharacters[] = {"a",          "b",      " ",      "  ",     "\n",      "'s",
                                            "1",          "<s>",    "\t",     "\u00e9", "e\u0301", "\u4f60",
                                            "\U0001f680", "\u0663", "\u2028", "."};
  std::string text;
  for (size_t n = rng() % 60; n > 0; --n) {
    if (!valid && rng() % 2 == 0) {
      text += static_cast<char>(rng() % 256);
    } else {
      text += kCharacters[rng() % std::size(kCharacters)];
    }
  }
  return text;
}

TEST(RoundTrip, ByteLevelVocabulariesGiveAnyBytesBack) {
  std::mt19937 rng(3);
  for (const char* pre : {"default", "gpt-2", "smollm", "falcon", "llama-bpe", "qwen2", "tekken", "deepseek-v3"}) {
    Vocabulary v = small_byte_bpe({"a b", "\u0120 a", "1 1", "\u00c3 \u00a9"});
    v.pre = pre;
    const Tokenizer t(v);
    for (int round = 0; round < 300; ++round) {
      const std::string text = random_text(rng, round % 2 == 0);
      ASSERT_EQ(t.decode(encode_plain(t, text)), text) << pre << " " << testing::PrintToString(text);
      ASSERT_EQ(t.decode(encode_plain(t, text, true), true), text) << pre << " " << testing::PrintToString(text);
    }
  }
}

TEST(RoundTrip, SentencePieceWithBytesGivesAnyBytesBack) {
  std::mt19937 rng(4);
  const Tokenizer t(small_sentencepiece({"\u2581", "a", "b", "ab", "\u2581a"}, true));
  for (int round = 0; round < 1000; ++round) {
    const std::string text = random_text(rng, round % 2 == 0);
    ASSERT_EQ(t.decode(encode_plain(t, text)), text) << testing::PrintToString(text);
  }
}

TEST(RoundTrip, PiecesThroughAStreamAreTheText) {
  std::mt19937 rng(5);
  const Tokenizer t(small_byte_bpe({}));
  for (int round = 0; round < 100; ++round) {
    const std::string text = random_text(rng, true);
    Utf8Stream stream;
    std::string out;
    for (const int32_t id : encode_plain(t, text)) out += stream.push(t.piece(id));
    ASSERT_EQ(out + stream.finish(), text);
  }
}

TEST(Cost, OneLongWordIsNotQuadratic) {
  // 64 times the text may take 64 times as long, and some for the logarithm; quadratic would be 4096 times.
  Vocabulary v = small_byte_bpe({"a a", "aa aa", "b a"});
  const Tokenizer t(v);
  const auto clocks = [&](size_t n) {
    const std::string text(n, 'a');
    double best = std::numeric_limits<double>::max();
    for (int run = 0; run < 3; ++run) {
      const std::clock_t start = std::clock();  // processor time: other programs don't count
      EXPECT_EQ(encode_plain(t, text).size(), n / 4);
      best = std::min(best, static_cast<double>(std::clock() - start));
    }
    return best;
  };
  const double small = clocks(1 << 14);
  EXPECT_LT(clocks(1 << 20), 640 * small);
}

}  // namespace
}  // namespace lacuna
