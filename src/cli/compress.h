// src/cli/compress.h - the commands of lacuna-compress.
#pragma once

#include "cli/command.h"

namespace lacuna::cli {

Action add_compress(CLI::App& program);

}  // namespace lacuna::cli
