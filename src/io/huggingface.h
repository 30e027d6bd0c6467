// src/io/huggingface.h - a Hugging Face folder: config.json, safetensors (one file, or shards with an index),
// tokenizer.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/mapped_file.h"
#include "core/vocabulary.h"
#include "io/import.h"
#include "io/metadata.h"
#include "io/safetensors.h"

namespace lacuna::io {

struct HfTensor {
  std::string name;  // GGUF's
  SafetensorsEntry entry;
  std::string file;
  std::optional<ImportedMatrix> imported = {};  // put together from several tensors, of which `entry` is one
};

struct HfFolder {
  std::string architecture;
  Metadata metadata;
  Vocabulary vocabulary;
  std::vector<MappedFile> files;  // keeps the entries' bytes alive
  std::vector<HfTensor> tensors;  // in file order
  std::vector<std::string> warnings;
};

/// Reads and checks everything but the weights' values; those that another program has quantized or pruned are put into
/// our layouts (io/import.h). With an index, its weight_map decides what is read and from where.
/// threads: that put them so; 0: one per core.
HfFolder open_huggingface(const std::string& folder, int threads = 0);

}  // namespace lacuna::io
