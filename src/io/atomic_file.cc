#include "io/atomic_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "core/error.h"

namespace lacuna::io {

namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// ".NAME.PID-COUNT.partial": hidden, unique in this folder, and refused by Checkpoint::open.
std::string temporary_name(const std::string& path) {
  static std::atomic<int> count{0};
  const std::filesystem::path p(path);
  const std::string name = fmt::format(".{}.{}-{}.partial", p.filename().string(), ::getpid(),
                                       count.fetch_add(1, std::memory_order_relaxed));
  return (p.parent_path() / name).string();
}

/// Removes what killed writers of the same file left: their process is gone and nothing was written for ten minutes (a
/// process of another container looks gone, but goes on writing).
void remove_left_overs(const std::string& path) {
  namespace fs = std::filesystem;
  const std::string prefix = fmt::format(".{}.", fs::path(path).filename().string());
  std::error_code failed;
  for (fs::directory_iterator entry(folder_of(path), failed), end; !failed && entry != end; entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(".partial")) continue;
    pid_t pid = 0;
    const char* first = name.data() + prefix.size();
    const auto [rest, error] = std::from_chars(first, name.data() + name.size(), pid);
    if (error != std::errc() || *rest != '-' || pid <= 0 || ::kill(pid, 0) == 0 || errno != ESRCH) continue;
    std::error_code ignored;
    const auto written = fs::last_write_time(entry->path(), ignored);
    if (!ignored && fs::file_time_type::clock::now() - written > std::chrono::minutes(10))
      fs::remove(entry->path(), ignored);
  }
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  if (path_.empty()) throw Error("the name of the file to write is empty; give one");
  std::error_code failed;
  if (std::filesystem::is_symlink(path_, failed)) {  // replace the file that the link names, not the link
    const auto target = std::filesystem::weakly_canonical(path_, failed);
    if (!failed) path_ = target.string();
  }
  struct stat info {};
  if (::stat(path_.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    if (S_ISDIR(info.st_mode)) throw Error("{}: is a folder; give the name of a file to write", path_);
    // A device or pipe has no final name to appear under: it is written straight through.
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) throw Error("{}: cannot open for writing: {}", path_, std::strerror(errno));
    return;
  }
  remove_left_overs(path_);
  temporary_ = temporary_name(path_);
  on_signal_.emplace(temporary_);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    const int reason = errno;
    const std::string temporary = std::exchange(temporary_, {});
    on_signal_.reset();
    throw Error("{}: cannot create {}: {}", path_, temporary, std::strerror(reason));
  }
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  position_ += int64_t(bytes.size());
  while (!bytes.empty()) {
    const size_t part = std::min(bytes.size(), kBufferBytes - buffer_.size());
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), part);
    bytes = bytes.subspan(part);
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void AtomicFile::flush() {
  for (size_t done = 0; done < buffer_.size();) {
    const ssize_t written = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (written < 0) {
      if (errno == EINTR) continue;
      throw Error("{}: writing stopped before byte {}: {}; nothing is left under this name", path_, position_,
                  std::strerror(errno));
    }
    done += size_t(written);
  }
  buffer_.clear();
}

void AtomicFile::overwrite(int64_t position, std::span<const std::byte> bytes) {
  flush();
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), off_t(position));
    if (written < 0) {
      if (errno == EINTR) continue;
      throw Error("{}: cannot write byte {} again: {}; nothing is left under this name", path_, position,
                  std::strerror(errno));
    }
    position += written;
    bytes = bytes.subspan(size_t(written));
  }
}

void AtomicFile::commit() {
  flush();
  if (temporary_.empty()) {
    if (::close(std::exchange(fd_, -1)) != 0) throw Error("{}: cannot finish writing: {}", path_, std::strerror(errno));
    return;
  }
  if (::fsync(fd_) != 0) throw Error("{}: cannot write to the disk: {}", path_, std::strerror(errno));
  if (::close(std::exchange(fd_, -1)) != 0) throw Error("{}: cannot finish writing: {}", path_, std::strerror(errno));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0)
    throw Error("{}: cannot rename the finished {}: {}", path_, temporary_, std::strerror(errno));
  temporary_.clear();
  on_signal_.reset();
  // The name itself is durable once its folder is; a file system that cannot sync folders says EINVAL.
  const std::string folder = folder_of(path_);
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw Error("{}: cannot open folder {}: {}", path_, folder, std::strerror(errno));
  const bool failed = ::fsync(fd) != 0 && errno != EINVAL;
  const int reason = errno;
  ::close(fd);
  if (failed) throw Error("{}: cannot sync folder {}: {}", path_, folder, std::strerror(reason));
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace lacuna::io
