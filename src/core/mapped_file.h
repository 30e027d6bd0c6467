// src/core/mapped_file.h - a read-only memory mapping of a whole file.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lacuna {

/// Maps the file read-only; the bytes live as long as the object. Throws Error with the system's reason.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }
  const std::string& path() const { return path_; }
  /// Tells the system that these bytes were read for the last time, so that their pages may leave memory (they can be
  /// read again). Bytes outside every live mapping are left alone.
  static void release(std::span<const std::byte> bytes);

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

}  // namespace lacuna
