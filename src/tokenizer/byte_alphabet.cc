#include "tokenizer/byte_alphabet.h"

#include <array>

namespace lacuna {

namespace {

constexpr int kLetters = 0x100 + 68;  // code points below this may be letters

struct Alphabet {
  std::array<std::string, 256> letter;   // by byte
  std::array<int16_t, kLetters> byte{};  // by code point, -1: no letter

  Alphabet() {
    byte.fill(-1);
    int next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      const int code_point = itself ? b : next++;
      byte[static_cast<size_t>(code_point)] = static_cast<int16_t>(b);
      std::string& text = letter[static_cast<size_t>(b)];
      if (code_point >= 0x80) {
        text += static_cast<char>(0xc0 | (code_point >> 6));
        text += static_cast<char>(0x80 | (code_point & 0x3f));
      } else {
        text += static_cast<char>(code_point);
      }
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet instance;
  return instance;
}

}  // namespace

std::string_view byte_to_letter(uint8_t byte) { return alphabet().letter[byte]; }

std::optional<std::string> letters_to_bytes(std::string_view letters) {
  const Alphabet& known = alphabet();
  std::string bytes;
  bytes.reserve(letters.size());
  for (size_t i = 0; i < letters.size(); ++i) {
    auto code_point = static_cast<size_t>(static_cast<uint8_t>(letters[i]));
    if (code_point >= 0x80) {  // every letter beyond ASCII takes two bytes
      if (code_point < 0xc2 || code_point > 0xc5 || i + 1 == letters.size()) return std::nullopt;
      code_point = (code_point & 0x1f) << 6 | (static_cast<uint8_t>(letters[++i]) & 0x3f);
    }
    if (code_point >= kLetters || known.byte[code_point] < 0) return std::nullopt;
    bytes += static_cast<char>(known.byte[code_point]);
  }
  return bytes;
}

}  // namespace lacuna
