// src/io/gguf_metadata.h - a GGUF file's metadata apart from its tensors: files that hold nothing else, and copies that
// change it.
#pragma once

#include <string>

#include "io/checkpoint.h"
#include "io/metadata.h"

namespace lacuna::io {

/// The metadata of any GGUF file. Throws Error as parse_gguf does.
Metadata read_gguf_metadata(const std::string& path);
/// A GGUF file without tensors.
void write_gguf_metadata(const std::string& path, const Metadata& metadata);
/// The tensors of a GGUF checkpoint as they are, with other metadata. Throws Error for a Hugging Face folder and for a
/// split file.
void copy_gguf(const Checkpoint& source, const Metadata& metadata, const std::string& path);

}  // namespace lacuna::io
