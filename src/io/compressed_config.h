// src/io/compressed_config.h - what compressed-tensors writes into config.json: how the weights of which modules were
// quantized and pruned.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/import.h"
#include "io/name_pattern.h"

namespace lacuna::io {

enum class ScaleOf : uint8_t { group, channel, tensor };  // inputs of a row, a row, the matrix

struct WeightScheme {
  int bits = 0;
  bool symmetric = true;
  ScaleOf scale_of = ScaleOf::tensor;
  int64_t group_size = 0;  // of ScaleOf::group
  bool packed = false;     // pack-quantized; else a byte a code
  bool ordered = false;    // weight_g_idx says which input is in which group
  friend bool operator==(const WeightScheme&, const WeightScheme&) = default;
};

class CompressedConfig {
 public:
  /// Throws Error for formats, types and settings that are not read, naming the known ones.
  CompressedConfig(const nlohmann::json& config, const std::string& where);

  /// Of the config_groups, the one whose targets name the module, else match it with a regular expression, else name
  /// its class. Lists of modules to ignore are not needed: their tensors are plain. Throws Error where there is none,
  /// or more than one.
  const WeightScheme& scheme_of(const ModuleTensors& module) const;

  bool two_of_four() const { return two_of_four_; }
  bool rounds_activations() const { return rounds_activations_; }

 private:
  struct Group {
    std::vector<std::string> names;  // of modules or classes
    std::vector<NamePattern> patterns;
    WeightScheme scheme;
  };
  void read_groups(const nlohmann::json& groups, const std::string& format, const std::string& where);
  void read_sparsity(const nlohmann::json& sparsity, const std::string& where);

  std::string where_;
  std::vector<Group> groups_;
  bool two_of_four_ = false, rounds_activations_ = false;
};

}  // namespace lacuna::io
