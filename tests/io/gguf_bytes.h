// tests/io/gguf_bytes.h - GGUF files put together byte by byte, also ones that lie.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace lacuna::test {

/// A little-endian byte string under construction.
class Bytes {
 public:
  template <class T>
  Bytes& number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Bytes& raw(std::string_view text) {
    text_ += text;
    return *this;
  }
  /// A 64-bit length and the text.
  Bytes& string(std::string_view text) { return number(uint64_t(text.size())).raw(text); }
  Bytes& pad(size_t alignment) {
    while (text_.size() % alignment != 0) text_ += '\0';
    return *this;
  }
  Bytes& gguf(uint64_t n_tensors, uint64_t n_kv, uint32_t version = 3) {
    return raw("GGUF").number(version).number(n_tensors).number(n_kv);
  }
  Bytes& tensor(std::string_view name, std::vector<uint64_t> ne, uint32_t type, uint64_t offset) {
    string(name).number(uint32_t(ne.size()));
    for (const uint64_t dim : ne) number(dim);
    return number(type).number(offset);
  }
  std::span<const std::byte> span() const { return std::as_bytes(std::span(text_)); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

inline void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  ASSERT_TRUE(out.good()) << path;
}

inline std::span<const std::byte> as_span(std::string_view text) { return std::as_bytes(std::span(text)); }

/// The message of the Error that `call` throws; a failure when it throws none.
template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

}  // namespace lacuna::test

/// Expects an Error whose message contains `part`, in one line.
#define EXPECT_ERROR(call, part)                                               \
  do {                                                                         \
    const std::string message = lacuna::test::error_of([&] { (void)(call); }); \
    EXPECT_NE(message.find(part), std::string::npos) << message;               \
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;               \
  } while (false)
