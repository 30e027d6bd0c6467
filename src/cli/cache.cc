#include "cli/cache.h"

#include <cstdlib>

namespace lacuna::cli {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string cache_folder() {
  if (std::string set = environment("LACUNA_CACHE"); !set.empty()) return set;
  // A relative path is not valid there and is to be ignored (XDG Base Directory Specification).
  if (const std::string xdg = environment("XDG_CACHE_HOME"); xdg.starts_with('/')) return xdg + "/lacuna";
  if (const std::string home = environment("HOME"); !home.empty()) return home + "/.cache/lacuna";
  return "";
}

}  // namespace lacuna::cli
