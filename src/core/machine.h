// src/core/machine.h - what the system says of this machine.
#pragma once

#include <cstdint>
#include <string>

namespace lacuna {

/// Size of the last-level cache as the system reports it; 0 when it does not.
int64_t last_level_cache_bytes();

/// "AMD Ryzen 7 5800X 8-Core Processor"; where the system names no model, what it says of the core's design, else the
/// architecture. One line without control characters, never empty.
std::string cpu_name();

}  // namespace lacuna
