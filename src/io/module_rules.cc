#include "io/module_rules.h"

#include <cassert>

#include "io/json.h"

namespace lacuna::io {

ModuleRules::ModuleRules(const QuantizationConfig& config) {
  const nlohmann::json* dynamic = JsonObject(config.settings, config.where).object("dynamic");
  if (dynamic == nullptr) return;
  assert(dynamic->size() == config.rules.size());
  const std::string where = config.where + ": dynamic";
  nlohmann::json whole = config.settings;
  whole.erase("dynamic");
  for (const std::string& key : config.rules) {
    if (key.starts_with("-:")) continue;
    const nlohmann::json& changes = dynamic->at(key);
    const JsonObject checked(changes, where);
    nlohmann::json merged = whole;
    for (const auto& [name, value] : changes.items()) {
      // The model's settings have the format under several names.
      if (name == "format")
        for (const char* other : {"checkpoint_format", "version"}) merged[other] = value;
      merged[name] = value;
    }
    patterns_.emplace_back(std::string_view(key).substr(key.starts_with("+:") ? 2 : 0), where);
    settings_.push_back(std::move(merged));
  }
}

int ModuleRules::rule_of(std::string_view module) const {
  for (size_t i = 0; i < patterns_.size(); ++i)
    if (patterns_[i].matches(module)) return int(i);
  return -1;
}

}  // namespace lacuna::io
