#include "core/files.h"

#include <system_error>

#include "core/error.h"

namespace lacuna {

bool file_exists(const std::filesystem::path& path) {
  std::error_code failed;
  const bool found = std::filesystem::exists(path, failed);
  if (failed) throw Error("{}: cannot be looked at: {}", path.string(), failed.message());
  return found;
}

int64_t file_bytes(const std::filesystem::path& path) {
  std::error_code failed;
  const auto bytes = std::filesystem::file_size(path, failed);
  if (failed) throw Error("{}: its size cannot be read: {}", path.string(), failed.message());
  return int64_t(bytes);
}

}  // namespace lacuna
