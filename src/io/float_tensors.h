// src/io/float_tensors.h - safetensors files of inputs and results: named arrays of floats.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/atomic_file.h"

namespace lacuna::io {

struct FloatTensor {
  std::vector<int64_t> dims;  // slowest first; empty: a scalar
  std::vector<float> values;
};
using FloatTensors = std::map<std::string, FloatTensor, std::less<>>;

/// Reads F32, F16 and BF16. Throws Error naming file and tensor for another type, NaN and infinity.
FloatTensors read_float_tensors(const std::string& path);

/// Writes tensors as F32 one after the other, so that they need not be in memory together. The file appears with
/// finish().
class FloatTensorWriter {
 public:
  using Plan = std::vector<std::pair<std::string, std::vector<int64_t>>>;  // names and dims, in their order in the file
  FloatTensorWriter(const std::string& path, const Plan& plan, const std::map<std::string, std::string>& metadata);
  /// The next values, of one tensor or a part of one.
  void write(std::span<const float> values);
  void finish();

 private:
  AtomicFile file_;
  int64_t left_ = 0;  // values to come
};

/// Writes all as F32, atomically; metadata: strings by name. Throws Error when the file cannot be written.
void write_float_tensors(const std::string& path, const FloatTensors& tensors,
                         const std::map<std::string, std::string>& metadata = {});

}  // namespace lacuna::io
