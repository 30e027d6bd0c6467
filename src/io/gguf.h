// src/io/gguf.h - the GGUF container, versions 2 and 3, little-endian (spec: ggml docs/gguf.md).
//
//   magic "GGUF", u32 version, u64 n_tensors, u64 n_kv
//   n_kv x      { string key, u32 value type, value }            string: u64 length, bytes
//   n_tensors x { string name, u32 n_dims, u64 ne[n_dims] (fastest first), u32 type, u64 offset }
//   padding to general.alignment (32 where absent), then the tensors' bytes; offsets count from here
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/metadata.h"

namespace lacuna::io {

constexpr int kGgmlTypeI8 = 24;
constexpr int64_t kGgufDefaultAlignment = 32;

/// A tensor as the file describes it.
struct GgufTensor {
  std::string name;
  int type = 0;                      // ggml's number
  std::vector<int64_t> dims;         // slowest first, each >= 1
  std::span<const std::byte> bytes;  // inside the parsed span
};

struct GgufFile {
  int version = 0;
  int64_t alignment = kGgufDefaultAlignment;
  Metadata metadata;
  std::vector<GgufTensor> tensors;  // in the order of the infos
};

/// Reads everything but the weights. Every count, length and offset is checked against the file's size before anything
/// is allocated; Error (starting with `path`) otherwise. The result points into `file`.
GgufFile parse_gguf(std::span<const std::byte> file, const std::string& path);

/// ggml's name of a type number, also of types that no layout here reads; empty for a number that ggml never used.
std::string_view ggml_type_name(int type);

/// general.alignment, 32 where absent. Throws Error unless it is a power of two from 8 to 2^20.
int64_t gguf_alignment(const Metadata& metadata, const std::string& path);

}  // namespace lacuna::io
