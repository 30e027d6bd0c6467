#include "io/documents.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "io/json.h"

namespace lacuna::io {

std::vector<std::string> split_documents(std::string_view text, const std::vector<std::string>& keys,
                                         const std::string& where) {
  if (!text.starts_with('{')) return {std::string(text)};
  std::vector<std::string> wanted = keys, documents;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = fmt::format("{}: line {}", where, number);
    const nlohmann::json object = parse_json_object(line, place);
    if (wanted.empty()) {
      if (object.contains("text"))
        wanted = {"text"};
      else
        wanted = {"prefix", "gold_completion"};
    }
    std::string& document = documents.emplace_back();
    for (const std::string& key : wanted) {
      const auto found = object.find(key);
      if (found == object.end() || !found->is_string()) {
        std::vector<std::string> names;
        for (const auto& [name, value] : object.items())
          if (value.is_string()) names.push_back(name);
        throw Error("{}: no string under the key '{}'; its strings are under: {}; name the keys with --json-keys",
                    place, key, fmt::join(names, ", "));
      }
      document += found->get<std::string>();
    }
  }
  return documents;
}

std::string join_documents(const std::vector<std::string>& documents) {
  return fmt::format("{}", fmt::join(documents, "\n\n"));
}

}  // namespace lacuna::io
