#include "io/json.h"

#include <algorithm>
#include <unordered_set>

#include "core/error.h"

namespace lacuna::io {

using nlohmann::json;

json parse_json(std::string_view text, const std::string& where) {
  std::vector<std::unordered_set<std::string>> open_objects;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaxJsonDepth) throw Error("{}: JSON nested deeper than {} levels", where, kMaxJsonDepth);
        if (event == json::parse_event_t::object_start) open_objects.emplace_back();
        break;
      case json::parse_event_t::object_end:
        open_objects.pop_back();
        break;
      case json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        if (!open_objects.back().insert(key).second) throw Error("{}: JSON key \"{}\" occurs twice", where, key);
        break;
      }
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& error) {
    std::string_view reason = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    if (const size_t end = reason.find("] "); reason.starts_with('[') && end != reason.npos)
      reason.remove_prefix(end + 2);
    throw Error("{}: bad JSON: {}", where, reason);
  }
}

json parse_json_object(std::string_view text, const std::string& where) {
  json out = parse_json(text, where);
  if (!out.is_object()) throw Error("{}: expected a JSON object at the top, found {}", where, out.type_name());
  return out;
}

std::vector<std::string> json_keys(std::string_view text, std::span<const std::string_view> path) {
  std::vector<std::string> out, around;  // around: the last key of each object around; empty in an array
  const auto collect = [&](int, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        around.emplace_back();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        around.pop_back();
        break;
      case json::parse_event_t::key:
        if (around.size() == path.size() + 1 && std::ranges::equal(std::span(around).first(path.size()), path))
          out.push_back(parsed.get<std::string>());
        around.back() = parsed.get<std::string>();
        break;
      default:
        break;
    }
    return true;
  };
  const json whole = json::parse(text, collect);
  return out;
}

JsonObject::JsonObject(const json& object, const std::string& where) : object_(object), where_(where) {
  if (!object.is_object()) throw Error("{}: expected a JSON object, found {}", where, object.type_name());
}

const json* JsonObject::find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

namespace {

[[noreturn]] void wrong(const std::string& where, const char* key, const char* expected, const json& found) {
  throw Error("{}: \"{}\" must be {}, found {}", where, key, expected, found.type_name());
}
[[noreturn]] void missing(const std::string& where, const char* key) {
  throw Error("{}: \"{}\" is missing", where, key);
}

}  // namespace

std::optional<int64_t> JsonObject::integer(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer()) wrong(where_, key, "an integer", *value);
  if (value->is_number_unsigned() && value->get<uint64_t>() > uint64_t(INT64_MAX))
    throw Error("{}: \"{}\" is {}, too large for 63 bits", where_, key, value->get<uint64_t>());
  return value->get<int64_t>();
}

std::optional<double> JsonObject::number(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong(where_, key, "a number", *value);
  return value->get<double>();
}

std::optional<bool> JsonObject::boolean(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong(where_, key, "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> JsonObject::string(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong(where_, key, "a string", *value);
  return value->get<std::string>();
}

const json* JsonObject::array(const char* key) const {
  const json* value = find(key);
  if (value != nullptr && !value->is_array()) wrong(where_, key, "an array", *value);
  return value;
}

const json* JsonObject::object(const char* key) const {
  const json* value = find(key);
  if (value != nullptr && !value->is_object()) wrong(where_, key, "an object", *value);
  return value;
}

int64_t JsonObject::need_integer(const char* key) const {
  if (const auto value = integer(key)) return *value;
  missing(where_, key);
}

std::string JsonObject::need_string(const char* key) const {
  if (auto value = string(key)) return *std::move(value);
  missing(where_, key);
}

const json& JsonObject::need_array(const char* key) const {
  if (const json* value = array(key)) return *value;
  missing(where_, key);
}

const json& JsonObject::need_object(const char* key) const {
  if (const json* value = object(key)) return *value;
  missing(where_, key);
}

}  // namespace lacuna::io
