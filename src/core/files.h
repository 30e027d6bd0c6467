// src/core/files.h - questions about files, answered or an Error that names the file.
#pragma once

#include <cstdint>
#include <filesystem>

namespace lacuna {

/// False: there is nothing of this name. Throws Error with the system's reason when that cannot be told (a folder that
/// may not be searched, a name that is too long, links that lead to themselves).
bool file_exists(const std::filesystem::path& path);

/// Bytes of a regular file. Throws Error with the system's reason.
int64_t file_bytes(const std::filesystem::path& path);

}  // namespace lacuna
