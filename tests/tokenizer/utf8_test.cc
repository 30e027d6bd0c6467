#include "tokenizer/utf8.h"

#include <gtest/gtest.h>

#include <random>

#include "tokenizer/tokenizer.h"

namespace lacuna {
namespace {

using Kind = Utf8Char::Kind;
using namespace std::string_literals;

TEST(Utf8, AcceptsTheLimitsOfEachLength) {
  for (const std::string text : {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                                 "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    const Utf8Char read = read_utf8(text, 0);
    EXPECT_EQ(read.kind, Kind::valid) << text;
    EXPECT_EQ(read.length, text.size()) << text;
  }
}

TEST(Utf8, RefusesOverlongSurrogateAndTooLarge) {
  for (const std::string text : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80",
                                 "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_EQ(read_utf8(text, 0).kind, Kind::invalid) << testing::PrintToString(text);
    EXPECT_EQ(read_utf8(text, 0).length, 1u) << testing::PrintToString(text);
  }
}

TEST(Utf8, TellsACutCharacterFromABrokenOne) {
  EXPECT_EQ(read_utf8("\xf0\x9f\x98", 0).kind, Kind::incomplete);
  EXPECT_EQ(read_utf8("\xf0\x9f\x98", 0).length, 3u);
  EXPECT_EQ(read_utf8("\xf0\x9f\x98x", 0).kind, Kind::invalid);
  EXPECT_EQ(read_utf8("\xf0\x9f\x98x", 0).length, 3u);
}

TEST(Utf8, ValidPrefixEndsAtTheFirstBadByte) {
  EXPECT_EQ(valid_utf8_prefix("ab\xc3\xa9\xff z"), 4u);
  EXPECT_EQ(valid_utf8_prefix("\xc3"), 0u);
  EXPECT_EQ(valid_utf8_prefix(""), 0u);
}

TEST(Utf8, NfcComposesAndKeepsNul) {
  EXPECT_EQ(to_nfc("e\xcc\x81"), "\xc3\xa9");
  EXPECT_EQ(to_nfc("a\0e\xcc\x81"s), "a\0\xc3\xa9"s);
  EXPECT_EQ(to_nfc("\xe2\x84\xab"), "\xc3\x85");                              // angstrom sign
  EXPECT_EQ(to_nfc("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab"), "\xed\x95\x9c");  // Hangul jamo
  EXPECT_EQ(to_nfc("\xef\xac\x81"), "\xef\xac\x81");                          // no compatibility forms
  EXPECT_EQ(to_nfc("\xcd\x84"), "\xcc\x88\xcc\x81");                          // excluded from composition
}

TEST(Utf8Stream, HoldsBackHalfACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xf0\x9f"), "a");
  EXPECT_EQ(stream.push("\x98"), "");
  EXPECT_EQ(stream.push("\x80!"), "\xf0\x9f\x98\x80!");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, ReplacesWhatCanNeverBecomeACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\xff"), "\xef\xbf\xbd");
  EXPECT_EQ(stream.push("\xe2\x82"), "");
  EXPECT_EQ(stream.push("A"),
            "\xef\xbf\xbd"
            "A");
  EXPECT_EQ(stream.push("\xe2\x82"), "");
  EXPECT_EQ(stream.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, GivesTheSameTextHoweverTheBytesAreCut) {
  std::mt19937 rng(7);
  for (int round = 0; round < 300; ++round) {
    std::string bytes;
    for (int i = 0; i < 40; ++i) {
      bytes += rng() % 3 == 0 ? "\xf0\x9f\x98\x80" : std::string(1, static_cast<char>(rng() % 256));
    }
    Utf8Stream whole;
    std::string expected = whole.push(bytes);
    expected += whole.finish();
    EXPECT_EQ(valid_utf8_prefix(expected), expected.size());
    Utf8Stream cut;
    std::string text;
    for (size_t at = 0; at < bytes.size();) {
      const size_t length = 1 + rng() % 5;
      const std::string part = cut.push(std::string_view(bytes).substr(at, length));
      EXPECT_EQ(valid_utf8_prefix(part), part.size());
      text += part;
      at += length;
    }
    EXPECT_EQ(text + cut.finish(), expected);
  }
}

}  // namespace
}  // namespace lacuna
