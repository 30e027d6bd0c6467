// src/io/gguf_split.h - a GGUF model as one file or as a set NAME-00001-of-00003.gguf (llama.cpp's naming).
#pragma once

#include <string>
#include <vector>

#include "core/mapped_file.h"
#include "io/gguf.h"

namespace lacuna::io {

struct GgufSet {
  std::vector<MappedFile> files;    // in the order of the parts
  Metadata metadata;                // the first part's, without split.*
  std::vector<GgufTensor> tensors;  // of all parts
};

/// Opens the file, and where it is part of a set all the other parts. Throws Error naming a missing or contradicting
/// part.
GgufSet open_gguf_set(const std::string& path);

}  // namespace lacuna::io
