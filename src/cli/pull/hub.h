// src/cli/pull/hub.h - models of the Hugging Face hub: one GGUF file, or a folder as its checkpoints are published.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/pull/http.h"

namespace lacuna::cli::pull {

/// owner/repo[@revision][/path/to/file]
struct HubName {
  std::string owner, repo, revision = "main", file;
  /// Throws Error that shows the form.
  static HubName parse(std::string_view text);
  std::string repository() const { return owner + "/" + repo; }
};

struct Pulled {
  std::string path;  // file or folder
  int64_t bytes = 0;
  std::string sha256;  // of a single file
  std::string source;  // where it came from
  bool already_there = false;
};

/// Brings what `name` means to `target` (empty: owner/repo below `models_dir`, owner/repo@revision when that is not
/// main): the named file (all parts of a split GGUF), else config, tokenizer and the safetensors that the index names,
/// else the repository's only GGUF file. A file or folder that was finished before is not even asked for again; in an
/// unfinished folder, what agrees with the hub's listing is kept. A file that is already at `target` must be the one
/// asked for, by `sha256` or else by the hub's sum: Error otherwise. Parts and folders are of one commit.
Pulled pull_from_hub(const Http& http, const std::string& endpoint, const HubName& name, const std::string& models_dir,
                     const std::string& target, const std::string& sha256);

}  // namespace lacuna::cli::pull
