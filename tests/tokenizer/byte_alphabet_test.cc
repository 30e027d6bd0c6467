#include "tokenizer/byte_alphabet.h"

#include <gtest/gtest.h>

#include <set>

namespace lacuna {
namespace {

TEST(ByteAlphabet, KnownLetters) {
  EXPECT_EQ(byte_to_letter('A'), "A");
  EXPECT_EQ(byte_to_letter(' '), "\u0120");
  EXPECT_EQ(byte_to_letter('\n'), "\u010a");
  EXPECT_EQ(byte_to_letter(0), "\u0100");
  EXPECT_EQ(byte_to_letter(127), "\u0121");
  EXPECT_EQ(byte_to_letter(161), "\u00a1");
  EXPECT_EQ(byte_to_letter(173), "\u0143");
  EXPECT_EQ(byte_to_letter(255), "\u00ff");
}

TEST(ByteAlphabet, IsAOneToOneMapOfAllBytes) {
  std::set<std::string_view> letters;
  std::string all;
  std::string text;
  for (int b = 0; b < 256; ++b) {
    letters.insert(byte_to_letter(static_cast<uint8_t>(b)));
    text += byte_to_letter(static_cast<uint8_t>(b));
    all += static_cast<char>(b);
  }
  EXPECT_EQ(letters.size(), 256u);
  EXPECT_EQ(letters_to_bytes(text), all);
}

TEST(ByteAlphabet, RefusesOtherCharacters) {
  EXPECT_EQ(letters_to_bytes("a b"), std::nullopt);
  EXPECT_EQ(letters_to_bytes("\u00ad"), std::nullopt);
  EXPECT_EQ(letters_to_bytes("\u0144"), std::nullopt);
  EXPECT_EQ(letters_to_bytes("\u2581"), std::nullopt);
  EXPECT_EQ(letters_to_bytes("\xc4"), std::nullopt);
  EXPECT_EQ(letters_to_bytes("\xff\xff"), std::nullopt);
  EXPECT_EQ(letters_to_bytes(""), "");
}

}  // namespace
}  // namespace lacuna
