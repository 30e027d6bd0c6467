// src/io/gguf_writer.h - writes a GGUF v3 file atomically, tensor after tensor, never holding more than one in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/atomic_file.h"
#include "io/metadata.h"
#include "layout/layout.h"

namespace lacuna::io {

struct TensorPlan {
  std::string name;
  const layout::Layout* layout = nullptr;
  std::vector<int64_t> dims;  // slowest first; the last is K
};

/// Header first, from a complete plan; then each tensor's bytes in the plan's order, in as many pieces as the caller
/// likes.
class GgufWriter {
 public:
  /// Writes to a temporary name beside `path`. Throws Error on any failure to write.
  GgufWriter(const std::string& path, const Metadata& metadata, std::vector<TensorPlan> tensors);
  ~GgufWriter();  // without finish(): the temporary file is removed
  /// The next bytes of the tensor being written. Padding between tensors is the writer's business.
  void write(std::span<const std::byte> bytes);
  /// Checks that every planned byte came, syncs and renames to the final name. Returns the file's size in bytes.
  int64_t finish();

 private:
  AtomicFile file_;
  std::vector<TensorPlan> tensors_;
  size_t current_ = 0;
  int64_t written_of_current_ = 0;
  int64_t alignment_;
  void advance();
};

}  // namespace lacuna::io
