// src/cli/pull/lock.h - files that one process at a time may have.
#pragma once

#include <optional>
#include <string>

#include "core/temporary_name.h"

namespace lacuna::cli::pull {

/// Opens (or makes) the file and locks it until the descriptor is closed or the process ends; -1: another process has
/// it. The file still has its name then, even if its last owner removed or renamed it meanwhile. Throws Error.
int open_locked(const std::string& path);

/// Holds `path` for one process, as long as it lives; the folder is made, the file removed at the end, also when a
/// signal ends the program.
class Lock {
 public:
  /// `what` is going on, as the Error says when another process has it.
  Lock(const std::string& path, const std::string& what);
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::string path_;
  int fd_;
  std::optional<TemporaryName> on_signal_;
};

}  // namespace lacuna::cli::pull
