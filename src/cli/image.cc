// src/cli/image.cc - `image`: the group of subcommands for diffusion transformers.
#include "cli/image.h"

#include <fmt/format.h>

#include <array>

#include "cli/command.h"
#include "core/error.h"

namespace lacuna::cli {

CLI::Validator image_side() {
  return {[](std::string& text) {
            constexpr int64_t kMost = 65536;
            int64_t value = 0;
            if (CLI::detail::lexical_cast(text, value) && value >= kPixelsPerToken && value <= kMost &&
                value % kPixelsPerToken == 0)
              return std::string();
            return fmt::format("'{}' is no multiple of {} from {} to {}", text, kPixelsPerToken, kPixelsPerToken,
                               kMost);
          },
          ""};
}

Action add_image(CLI::App& program) {
  CLI::App* group = program.add_subcommand(
      "image",
      "Diffusion transformers of the FLUX.1 type: their weights as FP8 and 2:4, steps, the whole loop, speed.");
  group->require_subcommand(1);
  std::vector<Action> actions;
  for (const auto add : {add_image_step, add_image_denoise, add_image_bench, add_image_linear, add_image_tune,
                         add_image_calibrate, add_image_compress, add_image_errors, add_image_policy})
    actions.push_back(add(*group));
  return [group, commands = group->get_subcommands([](CLI::App*) { return true; }), actions] {
    for (size_t i = 0; i < commands.size(); ++i)
      if (commands[i]->parsed()) return actions[i]();
    throw Error("image: no command given; see `lacuna image --help`");
  };
}

}  // namespace lacuna::cli
