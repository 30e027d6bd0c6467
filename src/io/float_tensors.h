// src/io/float_tensors.h - safetensors files of inputs and results: named arrays of floats.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lacuna::io {

struct FloatTensor {
  std::vector<int64_t> dims;  // slowest first; empty: a scalar
  std::vector<float> values;
};
using FloatTensors = std::map<std::string, FloatTensor, std::less<>>;

/// Reads F32, F16 and BF16. Throws Error naming file and tensor for another type, NaN and infinity.
FloatTensors read_float_tensors(const std::string& path);

/// Writes all as F32, atomically; metadata: strings by name. Throws Error when the file cannot be written.
void write_float_tensors(const std::string& path, const FloatTensors& tensors,
                         const std::map<std::string, std::string>& metadata = {});

}  // namespace lacuna::io
