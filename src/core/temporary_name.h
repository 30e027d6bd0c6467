// src/core/temporary_name.h - names of files and folders that must not stay behind when a signal ends the program.
#pragma once

#include <string>

namespace lacuna {

/// While it lives, a signal that remove_temporaries_on_signals() caught removes what has this name: a file, or a folder
/// that is empty by then. A name longer than the system's limit, or the 33rd at a time, is not remembered: it stays
/// behind as it does when SIGKILL ends the program.
class TemporaryName {
 public:
  explicit TemporaryName(const std::string& path);
  ~TemporaryName();
  TemporaryName(const TemporaryName&) = delete;
  TemporaryName& operator=(const TemporaryName&) = delete;

 private:
  int slot_ = -1;
};

/// SIGINT, SIGTERM and SIGHUP, where they are not ignored, end the program as they would by themselves, after the names
/// that live have been removed, the youngest first.
void remove_temporaries_on_signals();

}  // namespace lacuna
