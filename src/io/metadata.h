// src/io/metadata.h - typed key-value metadata, as GGUF stores it (spec: ggml docs/gguf.md, "Metadata").
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lacuna::io {

/// One value with GGUF's type kept. Arrays are homogeneous; nested arrays are refused by the reader.
using MetadataValue =
    std::variant<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, float, bool, std::string, uint64_t, int64_t,
                 double, std::vector<uint8_t>, std::vector<int8_t>, std::vector<uint16_t>, std::vector<int16_t>,
                 std::vector<uint32_t>, std::vector<int32_t>, std::vector<float>, std::vector<bool>,
                 std::vector<std::string>, std::vector<uint64_t>, std::vector<int64_t>, std::vector<double>>;

/// Ordered by insertion, so that a file copied through it keeps its order.
class Metadata {
 public:
  bool contains(std::string_view key) const { return find(key) != nullptr; }
  const MetadataValue* find(std::string_view key) const;
  /// Replaces an existing key's value in place.
  void set(std::string key, MetadataValue value);
  void erase(std::string_view key);
  const std::vector<std::pair<std::string, MetadataValue>>& entries() const { return entries_; }

  // Typed reads: any integer width is accepted where its value fits. nullopt: no such key. Throws Error naming key,
  // expected and found type.
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;  // integers too
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> string(std::string_view key) const;
  std::optional<std::vector<int64_t>> integers(
      std::string_view key) const;  // an array, or one integer as an array of one
  std::optional<std::vector<float>> numbers(std::string_view key) const;
  const std::vector<std::string>* strings(std::string_view key) const;  // nullptr: no such key
  // As above, but a missing key is an Error that names it.
  int64_t need_integer(std::string_view key) const;
  double need_number(std::string_view key) const;
  std::string need_string(std::string_view key) const;

 private:
  std::vector<std::pair<std::string, MetadataValue>> entries_;
  std::map<std::string, size_t, std::less<>> index_;
};

}  // namespace lacuna::io
