// src/io/json.h - JSON from files that nobody vouches for: bounded depth, no duplicate keys, typed reads that name the
// key.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lacuna::io {

constexpr int kMaxJsonDepth = 64;

/// Throws Error (starting with `where`) for bad syntax, bad UTF-8, nesting deeper than kMaxJsonDepth, or a key that
/// occurs twice in one object.
nlohmann::json parse_json(std::string_view text, const std::string& where);
/// As above, and the top must be an object.
nlohmann::json parse_json_object(std::string_view text, const std::string& where);

/// The keys of the object that `path` leads to from the top, in the order of the text, which nlohmann::json does not
/// keep. Empty where there is none. text: JSON that parse_json read.
std::vector<std::string> json_keys(std::string_view text, std::span<const std::string_view> path);

/// Typed reads of an object's keys. nullopt: the key is absent or null. Throws Error naming file, key, expected and
/// found type.
class JsonObject {
 public:
  /// object, where: must outlive this.
  JsonObject(const nlohmann::json& object, const std::string& where);

  const nlohmann::json* find(const char* key) const;
  std::optional<int64_t> integer(const char* key) const;
  std::optional<double> number(const char* key) const;
  std::optional<bool> boolean(const char* key) const;
  std::optional<std::string> string(const char* key) const;
  const nlohmann::json* array(const char* key) const;
  const nlohmann::json* object(const char* key) const;

  int64_t need_integer(const char* key) const;
  std::string need_string(const char* key) const;
  const nlohmann::json& need_array(const char* key) const;
  const nlohmann::json& need_object(const char* key) const;

 private:
  const nlohmann::json& object_;
  const std::string& where_;
};

}  // namespace lacuna::io
