#include "cli/pull/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace lacuna::cli::pull {

int open_locked(const std::string& path) {
  for (;;) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) throw Error("{}: cannot be opened: {}", path, std::strerror(errno));
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int failure = errno;
      ::close(fd);
      if (failure == EWOULDBLOCK) return -1;
      throw Error("{}: cannot be locked: {}", path, std::strerror(failure));
    }
    struct stat ours, named;
    if (::fstat(fd, &ours) == 0 && ::stat(path.c_str(), &named) == 0 && ours.st_ino == named.st_ino &&
        ours.st_dev == named.st_dev)
      return fd;
    ::close(fd);  // its owner ended between open and lock and took the name away
  }
}

Lock::Lock(const std::string& path, const std::string& what) : path_(path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code failed;
  if (!folder.empty()) std::filesystem::create_directories(folder, failed);
  if (failed) throw Error("{}: the folder cannot be made: {}", folder.string(), failed.message());
  fd_ = open_locked(path);
  if (fd_ < 0) throw Error("{}: {} is running; wait for it or stop it", path, what);
  on_signal_.emplace(path);
}

Lock::~Lock() {
  ::unlink(path_.c_str());
  ::close(fd_);
}

}  // namespace lacuna::cli::pull
