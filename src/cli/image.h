// src/cli/image.h - subcommands of `image`; each function adds one and returns its action.
#pragma once

#include "cli/command.h"

namespace lacuna::cli {

Action add_image_step(CLI::App& group);
Action add_image_denoise(CLI::App& group);
Action add_image_bench(CLI::App& group);

}  // namespace lacuna::cli
