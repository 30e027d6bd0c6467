// src/io/byte_reader.h - a cursor over untrusted little-endian bytes; every read is checked against what is left.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"

namespace lacuna::io {

static_assert(std::endian::native == std::endian::little, "stored numbers are little-endian and read in place");

class ByteReader {
 public:
  /// where: the file's name for error messages.
  ByteReader(std::span<const std::byte> bytes, std::string_view where) : bytes_(bytes), where_(where) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return bytes_.size() - position_; }

  /// what: the thing being read, for the error message.
  std::span<const std::byte> take(uint64_t count, std::string_view what) {
    if (count > remaining())
      throw Error("{}: {} at byte {} needs {} bytes, but the file ends after {} more; it is cut short or damaged",
                  where_, what, position_, count, remaining());
    const auto out = bytes_.subspan(position_, count);
    position_ += count;
    return out;
  }
  template <class T>
  T read(std::string_view what) {
    T out;
    std::memcpy(&out, take(sizeof(T), what).data(), sizeof(T));
    return out;
  }
  /// A 64-bit length, then that many bytes.
  std::string read_string(std::string_view what) {
    const auto bytes = take(read<uint64_t>(what), what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view where_;
  uint64_t position_ = 0;
};

}  // namespace lacuna::io
