#include "core/cpu_quota.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>

namespace lacuna {

std::optional<int> cores_of_quota(std::string_view cpu_max) {
  int64_t quota = 0, period = 0;
  const char* const end = cpu_max.data() + cpu_max.size();
  const auto first = std::from_chars(cpu_max.data(), end, quota);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ' ') return std::nullopt;
  if (std::from_chars(first.ptr + 1, end, period).ec != std::errc() || quota <= 0 || period <= 0) return std::nullopt;
  return int(std::min<int64_t>(quota / period + (quota % period != 0), std::numeric_limits<int>::max()));
}

}  // namespace lacuna
