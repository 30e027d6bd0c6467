#include "core/huge_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace lacuna {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

HugeBuffer::HugeBuffer(size_t size, bool huge) : size_(size) {
  if (size == 0) return;
  const bool ordinary = !huge;
  huge = huge && size >= kHugePage;
  if (__builtin_add_overflow(size, huge ? kHugePage : 0, &map_size_))
    throw Error("cannot reserve {} bytes of memory: no address space is that large", size);
  map_ = ::mmap(nullptr, map_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    throw Error("cannot reserve {} bytes of memory: {}", size, std::strerror(errno));
  }
  data_ = static_cast<std::byte*>(map_);
  if (ordinary) ::madvise(map_, map_size_, MADV_NOHUGEPAGE);  // where the system gives huge pages to everybody
  if (huge) {
    const auto address = reinterpret_cast<uintptr_t>(map_);
    data_ += (address + kHugePage - 1) / kHugePage * kHugePage - address;
    ::madvise(data_, size, MADV_HUGEPAGE);  // a hint: without it the buffer works, slower
  }
}

HugeBuffer::~HugeBuffer() {
  if (map_ != nullptr) ::munmap(map_, map_size_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      map_(std::exchange(other.map_, nullptr)),
      map_size_(std::exchange(other.map_size_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(map_, other.map_);
  std::swap(map_size_, other.map_size_);
  return *this;
}

}  // namespace lacuna
