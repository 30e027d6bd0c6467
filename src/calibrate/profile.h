// src/calibrate/profile.h - what `lacuna tune` found on a machine, as a JSON file:
//   {"lacuna_profile": 2, "version": "0.1.0", "cpu": "...", "isa": "avx512", "threads": 8, "groups": {KEY: {
//     "name": "attn_output", "bytes": 1327104, "levels": [0, 0.25, ...], "noise": 0.004,
//     "plan": {"split": "rows", "chunk": 32, "prefetch": 4, "tile_rows": 0, "dense_below": 0.04},
//     "measured": [{"plan": {...}, "dense_ms": 0.1, "sparse_ms": [0.1, ...], "rounds": 40}, ...]}, ...}}
// KEY is kernels::plan_key; the plans in "measured" have no dense_below.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "calibrate/tuner.h"
#include "kernels/plan.h"

namespace lacuna::calibrate {

/// What measured times depend on besides the shapes.
struct Machine {
  std::string cpu, isa;
  int threads = 0;
  std::string version;  // of this program

  bool operator==(const Machine&) const = default;
};

struct Profile {
  Machine machine;
  std::map<std::string, GroupTuning> groups;  // by key

  kernels::Plans plans() const;
  /// Adds groups; those that were known are replaced.
  void merge(const std::vector<GroupTuning>& tuned);
  std::string to_json() const;
  /// Throws Error that names what is wrong for anything but such a file.
  static Profile parse(std::string_view text, const std::string& where);

  bool operator==(const Profile&) const = default;
};

/// "intel-r-xeon-r-processor-avx512vnni-2-threads.json".
std::string profile_file_name(const Machine& machine);

/// nullopt: there is no such file. Throws Error when it cannot be read, is damaged, holds plans that make no sense, or
/// was made by another version, on another CPU or instruction set, or for another number of threads.
std::optional<Profile> load_profile(const std::string& path, const Machine& here);

/// Makes the folder and replaces the file at once.
void save_profile(const std::string& path, const Profile& profile);

}  // namespace lacuna::calibrate
