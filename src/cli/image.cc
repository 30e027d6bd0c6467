#include "cli/image.h"

#include <memory>

#include "core/error.h"

namespace lacuna::cli {

Action add_image(CLI::App& program) {
  CLI::App* image = program.add_subcommand(
      "image",
      "Diffusion transformers: store one in FP8 and 2:4. `lacuna image COMMAND --help` explains each command.");
  image->require_subcommand(1);
  auto commands = std::make_shared<std::vector<ImageCommand>>(add_image_weights(*image));
  return [commands]() -> int {
    for (const auto& [command, action] : *commands)
      if (command->parsed()) return action();
    throw Error("no image command given; see `lacuna image --help`");
  };
}

}  // namespace lacuna::cli
