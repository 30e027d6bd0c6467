// src/core/error.h - the one exception for what a user can cause: files, flags, requests.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace lacuna {

/// Says in one sentence what is wrong, where, what was expected, what was found and what to do. Broken invariants
/// assert instead.
class Error : public std::runtime_error {
 public:
  template <class... Args>
  explicit Error(fmt::format_string<Args...> format, Args&&... args)
      : std::runtime_error(whole(fmt::format(format, std::forward<Args>(args)...))) {}

 private:
  /// what() ends at the first NUL, which a name from a file may hold: it becomes \x00.
  static std::string whole(std::string text);
};

/// Runs `work`; its Error gets the file's name in front unless it begins with it.
template <class Work>
decltype(auto) naming_file(std::string_view file, Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const Error& error) {
    if (std::string_view(error.what()).starts_with(file)) throw;
    throw Error("{}: {}", file, error.what());
  }
}

}  // namespace lacuna
