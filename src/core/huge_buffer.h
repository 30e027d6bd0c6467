// src/core/huge_buffer.h - zeroed memory for prepared weights and caches: 64-byte aligned, on transparent huge pages
// where the system gives them.
#pragma once

#include <cstddef>
#include <span>

namespace lacuna {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  /// Reserves `size` bytes of zeros; pages are taken on first touch. Throws Error when the system refuses.
  /// huge = false: ordinary pages, for memory of which only a little is touched here and there.
  explicit HugeBuffer(size_t size, bool huge = true);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() { return {data_, size_}; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  void* map_ = nullptr;
  size_t map_size_ = 0;
};

}  // namespace lacuna
