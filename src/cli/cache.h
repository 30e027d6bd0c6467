// src/cli/cache.h - the user's folder for what this program keeps between runs.
#pragma once

#include <string>

namespace lacuna::cli {

/// An environment variable; empty where it is not set.
std::string environment(const char* name);

/// $LACUNA_CACHE, else $XDG_CACHE_HOME/lacuna, else $HOME/.cache/lacuna; empty where none of them is set.
std::string cache_folder();

}  // namespace lacuna::cli
