#include "io/metadata.h"

#include <limits>
#include <type_traits>
#include <utility>

#include "core/error.h"

namespace lacuna::io {

namespace {

template <class T>
struct is_vector : std::false_type {};
template <class T>
struct is_vector<std::vector<T>> : std::true_type {};

template <class T>
constexpr bool is_integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;

// In the order of the variant's alternatives.
constexpr std::string_view kTypeNames[] = {
    "uint8",         "int8",       "uint16",       "int16",        "uint32",       "int32",
    "float32",       "bool",       "string",       "uint64",       "int64",        "float64",
    "uint8 array",   "int8 array", "uint16 array", "int16 array",  "uint32 array", "int32 array",
    "float32 array", "bool array", "string array", "uint64 array", "int64 array",  "float64 array"};
static_assert(std::size(kTypeNames) == std::variant_size_v<MetadataValue>);

[[noreturn]] void wrong_type(std::string_view key, std::string_view expected, const MetadataValue& found) {
  throw Error("metadata key {}: expected {}, found {}", key, expected, kTypeNames[found.index()]);
}

template <class T>
int64_t to_int64(std::string_view key, T value) {
  if constexpr (std::is_same_v<T, uint64_t>) {
    if (value > uint64_t(std::numeric_limits<int64_t>::max()))
      throw Error("metadata key {}: {} does not fit 63 bits", key, value);
  }
  return int64_t(value);
}

}  // namespace

const MetadataValue* Metadata::find(std::string_view key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &entries_[found->second].second;
}

void Metadata::set(std::string key, MetadataValue value) {
  const auto [at, added] = index_.try_emplace(key, entries_.size());
  if (added)
    entries_.emplace_back(std::move(key), std::move(value));
  else
    entries_[at->second].second = std::move(value);
}

void Metadata::erase(std::string_view key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return;
  const size_t position = found->second;
  index_.erase(found);
  entries_.erase(entries_.begin() + std::ptrdiff_t(position));
  for (auto& [name, at] : index_) at -= at > position;
}

std::optional<int64_t> Metadata::integer(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  return std::visit(
      [&](const auto& v) -> int64_t {
        if constexpr (is_integer<std::decay_t<decltype(v)>>)
          return to_int64(key, v);
        else
          wrong_type(key, "an integer", *value);
      },
      *value);
}

std::optional<double> Metadata::number(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  return std::visit(
      [&](const auto& v) -> double {
        using T = std::decay_t<decltype(v)>;
        if constexpr (is_integer<T> || std::is_floating_point_v<T>)
          return double(v);
        else
          wrong_type(key, "a number", *value);
      },
      *value);
}

std::optional<bool> Metadata::boolean(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const bool* v = std::get_if<bool>(value)) return *v;
  wrong_type(key, "a bool", *value);
}

std::optional<std::string> Metadata::string(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (const std::string* v = std::get_if<std::string>(value)) return *v;
  wrong_type(key, "a string", *value);
}

std::optional<std::vector<int64_t>> Metadata::integers(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  return std::visit(
      [&](const auto& v) -> std::vector<int64_t> {
        using T = std::decay_t<decltype(v)>;
        if constexpr (is_integer<T>) {
          return {to_int64(key, v)};
        } else if constexpr (is_vector<T>::value) {
          if constexpr (is_integer<typename T::value_type>) {
            std::vector<int64_t> out;
            out.reserve(v.size());
            for (const auto element : v) out.push_back(to_int64(key, element));
            return out;
          }
        }
        wrong_type(key, "an array of integers", *value);
      },
      *value);
}

std::optional<std::vector<float>> Metadata::numbers(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  return std::visit(
      [&](const auto& v) -> std::vector<float> {
        using T = std::decay_t<decltype(v)>;
        if constexpr (is_vector<T>::value) {
          using Element = typename T::value_type;
          if constexpr (is_integer<Element> || std::is_floating_point_v<Element>) {
            std::vector<float> out;
            out.reserve(v.size());
            for (const auto element : v) out.push_back(float(element));
            return out;
          }
        }
        wrong_type(key, "an array of numbers", *value);
      },
      *value);
}

const std::vector<std::string>* Metadata::strings(std::string_view key) const {
  const MetadataValue* value = find(key);
  if (value == nullptr) return nullptr;
  if (const auto* v = std::get_if<std::vector<std::string>>(value)) return v;
  wrong_type(key, "an array of strings", *value);
}

int64_t Metadata::need_integer(std::string_view key) const {
  if (const auto value = integer(key)) return *value;
  throw Error("metadata key {} is missing (an integer)", key);
}

double Metadata::need_number(std::string_view key) const {
  if (const auto value = number(key)) return *value;
  throw Error("metadata key {} is missing (a number)", key);
}

std::string Metadata::need_string(std::string_view key) const {
  if (auto value = string(key)) return *std::move(value);
  throw Error("metadata key {} is missing (a string)", key);
}

}  // namespace lacuna::io
