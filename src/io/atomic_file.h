// src/io/atomic_file.h - a file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/temporary_name.h"

namespace lacuna::io {

/// Buffered writes to a temporary name in the same folder; commit() flushes, fsyncs, renames. Destroyed without
/// commit(), or on an error, it removes the temporary file. Throws Error with path and system reason (a full disk says
/// so). So does a signal after remove_temporaries_on_signals().
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(std::span<const std::byte> bytes);
  int64_t position() const { return position_; }
  /// Replaces bytes that were written before; throws Error for a pipe, which has no way back.
  void overwrite(int64_t position, std::span<const std::byte> bytes);
  void commit();

 private:
  void flush();
  std::string path_, temporary_;
  std::optional<TemporaryName> on_signal_;  // of temporary_
  int fd_ = -1;
  int64_t position_ = 0;
  std::string buffer_;
};

/// write + commit of a whole text.
void write_file_atomically(const std::string& path, std::string_view text);

}  // namespace lacuna::io
