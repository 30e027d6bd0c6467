// src/core/say.h - text to stderr that never fails.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace lacuna {

/// Writes `text` to stderr. A stderr that is closed or full loses it, and that is all: what a program says beside its
/// result must not end it.
void say_text(std::string_view text) noexcept;

/// The same, formatted.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  say_text(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lacuna
