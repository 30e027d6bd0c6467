#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"

namespace lacuna {
namespace {

/// Live mappings, so that release() can tell them from other memory, whose contents it would destroy.
struct Mappings {
  std::mutex mutex;
  std::map<uintptr_t, uintptr_t> end_of;  // by first address
  void add(const void* data, size_t size) {
    const std::lock_guard lock(mutex);
    end_of[reinterpret_cast<uintptr_t>(data)] = reinterpret_cast<uintptr_t>(data) + size;
  }
  void remove(const void* data) {
    const std::lock_guard lock(mutex);
    end_of.erase(reinterpret_cast<uintptr_t>(data));
  }
};
Mappings& mappings() {
  static auto* const all = new Mappings;  // outlives every static MappedFile
  return *all;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error("{}: cannot open: {}", path, std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    throw Error("{}: not a regular file", path);
  }
  size_ = size_t(info.st_size);
  if (size_ > 0) {
    data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    if (data_ == MAP_FAILED) {
      const int reason = errno;
      ::close(fd);
      data_ = nullptr;
      throw Error("{}: cannot map {} bytes: {}", path, size_, std::strerror(reason));
    }
    mappings().add(data_, size_);
  }
  ::close(fd);
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  mappings().remove(data_);
  ::munmap(data_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

void MappedFile::release(std::span<const std::byte> bytes) {
  const auto page = uintptr_t(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size()) / page * page;
  if (last <= first) return;
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  auto mapping = all.end_of.upper_bound(first);
  if (mapping == all.end_of.begin() || last > (--mapping)->second) return;
  auto* data = const_cast<std::byte*>(bytes.data());
  ::madvise(data + (first - reinterpret_cast<uintptr_t>(data)), last - first, MADV_DONTNEED);
}

}  // namespace lacuna
