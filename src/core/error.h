// src/core/error.h - the one exception for what a user can cause: files, flags, requests.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

namespace lacuna {

/// Says in one sentence what is wrong, where, what was expected, what was found and what to do. Broken invariants
/// assert instead.
class Error : public std::runtime_error {
 public:
  template <class... Args>
  explicit Error(fmt::format_string<Args...> format, Args&&... args)
      : std::runtime_error(fmt::format(format, std::forward<Args>(args)...)) {}
};

}  // namespace lacuna
