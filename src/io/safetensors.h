// src/io/safetensors.h - the safetensors container (spec: huggingface/safetensors README, "Format").
//
//   u64 length of the header, the header (a JSON object: name -> {dtype, shape, data_offsets [begin, end)}), the bytes;
//   offsets count from the byte after the header. "__metadata__" maps strings to strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lacuna::io {

struct SafetensorsEntry {
  std::string name;
  std::string_view dtype;            // "F32", "BF16", ...
  std::vector<int64_t> dims;         // slowest first; empty: a scalar
  std::span<const std::byte> bytes;  // inside the parsed span
};

/// Entries in file order. Every length and offset is checked before anything is allocated: spans lie in the file, equal
/// shape x dtype size, do not overlap and leave no gap. Error (starting with `path`) otherwise.
std::vector<SafetensorsEntry> parse_safetensors(std::span<const std::byte> file, const std::string& path);

}  // namespace lacuna::io
