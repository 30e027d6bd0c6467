// src/core/cpu_quota.h - how much CPU time a control group grants, as containers limit it.
#pragma once

#include <optional>
#include <string_view>

namespace lacuna {

/// Whole cores that a control group's cpu.max allows, rounded up: "150000 100000" is 2; nullopt for "max ..." and for
/// anything else (Linux, Documentation/admin-guide/cgroup-v2.rst).
std::optional<int> cores_of_quota(std::string_view cpu_max);

}  // namespace lacuna
