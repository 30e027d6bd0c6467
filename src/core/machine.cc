#include "core/machine.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <string_view>

namespace lacuna {

int64_t last_level_cache_bytes() {
  for (const int name : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE})
    if (const long size = ::sysconf(name); size > 0) return size;
  return 0;
}

std::string cpu_name() {
  std::string model, implementer, part, line;
  std::ifstream info("/proc/cpuinfo");
  const auto take = [&](std::string_view key, std::string& value) {
    if (!value.empty() || !line.starts_with(key)) return;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) return;
    for (const char c : line.substr(colon + 1))
      if (static_cast<unsigned char>(c) >= 0x20 && !(value.empty() && c == ' ')) value += c;
  };
  while (std::getline(info, line)) {
    take("model name", model);
    take("CPU implementer", implementer);
    take("CPU part", part);
  }
  if (!model.empty()) return model;
  if (!implementer.empty() && !part.empty()) return fmt::format("implementer {} part {}", implementer, part);
  utsname system{};
  return ::uname(&system) == 0 ? std::string(system.machine) : "unknown CPU";
}

}  // namespace lacuna
