#include "calibrate/profile_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "io/atomic_file.h"

namespace lacuna::calibrate {
namespace {

constexpr size_t kMostBytes = size_t{64} << 20;  // a profile has a few KiB a group

}  // namespace

std::string file_name_of(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (plain)
      out += c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    else if (!out.empty() && out.back() != '-')
      out += '-';
  }
  return out;
}

double need_number(const io::JsonObject& object, const char* key, const std::string& where) {
  const auto value = object.number(key);
  if (!value) throw Error("{}: \"{}\" is missing", where, key);
  return *value;
}

void check_ms(double ms, const std::string& where) {
  if (!(ms > 0 && ms < 1e9)) throw Error("{}: a time of {} ms", where, ms);
}

std::optional<std::string> read_profile_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    throw Error("{}: cannot be opened: {}", path, std::strerror(errno));
  }
  std::string text;
  char buffer[1 << 16];
  size_t got = 0;
  while ((got = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0) {
    text.append(buffer, got);
    if (text.size() > kMostBytes) throw Error("{}: larger than any profile", path);
  }
  if (std::ferror(file.get())) throw Error("{}: cannot be read: {}", path, std::strerror(errno));
  return text;
}

void write_profile_file(const std::string& path, const std::string& text) {
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code failed;
  if (!folder.empty()) std::filesystem::create_directories(folder, failed);
  if (failed) throw Error("{}: cannot be created: {}", folder.string(), failed.message());
  io::write_file_atomically(path, text);
}

}  // namespace lacuna::calibrate
