// src/io/name_pattern.h - regular expressions in a checkpoint's configuration, which say which modules they are about.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace lacuna::io {

/// Matched from the beginning of a name, not necessarily to its end, as Python's re.match does.
class NamePattern {
 public:
  /// where: begins the errors. Throws Error for an expression that does not compile.
  NamePattern(std::string_view regex, const std::string& where);

  /// Throws Error where the search takes too many steps: the expression is a stranger's.
  bool matches(std::string_view name) const;

 private:
  std::string regex_, where_;
  std::shared_ptr<const void> code_;  // pcre2_code
};

}  // namespace lacuna::io
