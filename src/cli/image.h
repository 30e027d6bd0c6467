// src/cli/image.h - subcommands of `image`; each function adds one and returns its action.
#pragma once

#include "cli/command.h"

namespace lacuna::cli {

Action add_image_compress(CLI::App& group);
Action add_image_policy(CLI::App& group);

}  // namespace lacuna::cli
