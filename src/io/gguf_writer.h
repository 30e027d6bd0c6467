// src/io/gguf_writer.h - writes a GGUF v3 file atomically, tensor after tensor, never holding more than one in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
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
  std::vector<int64_t> dims;  // slowest first; the last is K. A packed layout's are N and K
  layout::Params params = {};
};

/// Header first, from a complete plan; then each tensor's bytes in the plan's order, in as many pieces as the caller
/// likes. Tensors in packed layouts become I8 tensors and the key lacuna.manifest is written for them: an entry that
/// `metadata` has for the same layout, shape and parameters is kept (the tensor is a copy), others are new and need
/// set_source_sha256. An older manifest's other entries are dropped.
class GgufWriter {
 public:
  /// Writes to a temporary name beside `path`. Throws Error on any failure to write.
  GgufWriter(const std::string& path, const Metadata& metadata, std::vector<TensorPlan> tensors);
  ~GgufWriter();  // without finish(): the temporary file is removed
  /// The next bytes of the tensor being written. Padding between tensors is the writer's business.
  void write(std::span<const std::byte> bytes);
  /// The SHA-256 of what a packed tensor was made from, as 64 hex digits; any time before finish().
  void set_source_sha256(const std::string& tensor, const std::string& hex);
  /// Checks that every planned byte and digest came, syncs and renames to the final name. Returns the file's size in
  /// bytes.
  int64_t finish();

 private:
  AtomicFile file_;
  std::vector<TensorPlan> tensors_;
  size_t current_ = 0;
  int64_t written_of_current_ = 0;
  int64_t alignment_;
  std::map<std::string, int64_t, std::less<>> sha256_at_;  // places in the file of the digests that are still to come
  void advance();
};

}  // namespace lacuna::io
