// src/io/module_rules.h - GPTQModel's "dynamic": settings that some modules have instead of the model's.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/import.h"
#include "io/name_pattern.h"

namespace lacuna::io {

/// An object: regular expression (a "+:" before it says nothing) -> changes. The first in the order of the file that
/// matches a module's name counts. Those with "-:" before them leave modules as they were, which the tensors show.
class ModuleRules {
 public:
  explicit ModuleRules(const QuantizationConfig& config);

  /// What differs from one rule to another, in the order of rule_of: all settings of the model with the rule's changes.
  const std::vector<nlohmann::json>& settings() const { return settings_; }
  /// Index into settings(), or -1 where no rule is for the module.
  int rule_of(std::string_view module) const;

 private:
  std::vector<NamePattern> patterns_;
  std::vector<nlohmann::json> settings_;
};

}  // namespace lacuna::io
