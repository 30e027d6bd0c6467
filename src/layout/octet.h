// src/layout/octet.h - codes of 2, 3, 4 or 8 bits as a string of bits: low bits first, bit i of the string is bit i % 8
// of byte i / 8. Eight codes of B bits (an octet) fill exactly B bytes, so that octets begin at whole bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lacuna::layout {

inline constexpr int64_t kOctet = 8;  // codes of an octet

/// Bytes of `count` codes, without padding.
constexpr int64_t code_bytes(int bits, int64_t count) {
  return count / kOctet * bits + (count % kOctet * bits + 7) / 8;
}

/// Writes `count` <= 8 codes, each below 2^bits, into code_bytes(bits, count) bytes; bits past the last are zero.
inline void write_octet(int bits, const uint8_t* code, int64_t count, std::byte* out) {
  uint64_t string = 0;
  for (int64_t i = 0; i < count; ++i) string |= uint64_t(code[i]) << (bits * int(i));
  for (int64_t b = 0; b < code_bytes(bits, count); ++b) out[b] = std::byte(string >> (8 * b));
}

/// The inverse; returns whether the bits past the last code are zero.
inline bool read_octet(int bits, const std::byte* in, int64_t count, uint8_t* code) {
  uint64_t string = 0;
  for (int64_t b = 0; b < code_bytes(bits, count); ++b) string |= uint64_t(in[b]) << (8 * b);
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int64_t i = 0; i < count; ++i) code[i] = uint8_t((string >> (bits * int(i))) & mask);
  return count == kOctet || (string >> (bits * int(count))) == 0;
}

/// Code i of a string.
inline uint8_t code_at(int bits, const std::byte* string, int64_t i) {
  const int64_t byte = i / kOctet * bits + i % kOctet * bits / 8;
  const int shift = int(i % kOctet * bits % 8);
  auto two = uint32_t(string[byte]);
  if (shift + bits > 8) two |= uint32_t(string[byte + 1]) << 8;
  return uint8_t(two >> shift & ((1u << bits) - 1));
}

}  // namespace lacuna::layout
