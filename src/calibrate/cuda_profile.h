// src/calibrate/cuda_profile.h - what `lacuna tune --device cuda` found on a card, as a JSON file:
//   {"lacuna_cuda_profile": 1, "version": "0.1.0", "gpu": "NVIDIA H100 80GB HBM3", "driver": "13.0", "products": [
//     {"layout": "zz4_k", "rows": 86, "inputs": 4096, "percent": 50, "standard_ms": 1.40, "tuned_ms": 1.36,
//      "plan": {"warps": 8, "chunk": 32, "resident": 24, "segments": 4, "early_headers": 1, "early_codes": 0.2,
//               "skips": true}}, ...],
//    "group_sparse": [
//     {"layout": "gs4", "rows": 48, "inputs": 4096, "group_size": 16, "kept_percent": 50, "standard_ms": 1.59,
//      "tuned_ms": 1.57, "plan": {"split": "stream", "math": "dot", "warps": 16, "resident": 32, "blocks": 264,
//               "early": 0}}, ...],
//    "tensor_core": [
//     {"layout": "nm24_f8", "accumulate": "fast", "tokens": 4608, "outputs": 21504, "inputs": 3072, "groups": 0,
//      "standard_us": 460.2, "tuned_us": 441.5, "plan": {"rows": 128, "tokens": 192, "cluster": 2}}, ...]}
// products, zigzag ones, and group_sparse: of `lacuna tune`; the times are of a whole token, with the default plan of
// this product and with this one, the others as they were. tensor_core: of `lacuna image tune`, times of the product
// alone. group_sparse and tensor_core may be missing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/plans.h"
#include "kernels/cuda/tensor_core_table.h"
#include "model/cuda_decoder.h"

namespace lacuna::calibrate {

/// What measured times depend on besides the products.
struct CudaMachine {
  std::string gpu, driver;
  std::string version;  // of this program

  bool operator==(const CudaMachine&) const = default;
};

struct CudaProfile {
  CudaMachine machine;
  std::vector<model::CudaTuning> products{};
  std::vector<model::CudaGroupsTuning> group_sparse{};
  cuda::TensorCoreTable tensor_core{};

  cuda::Plans plans() const;
  /// Adds products; those that were known are replaced.
  void merge(const std::vector<model::CudaTuning>& tuned);
  void merge(const std::vector<model::CudaGroupsTuning>& tuned);
  std::string to_json() const;
  /// Throws Error that names what is wrong for anything but such a file.
  static CudaProfile parse(std::string_view text, const std::string& where);

  bool operator==(const CudaProfile&) const = default;
};

/// One of "products".
nlohmann::ordered_json product_json(const model::CudaTuning& tuning);
/// One of "group_sparse".
nlohmann::ordered_json product_json(const model::CudaGroupsTuning& tuning);
/// One of "tensor_core".
nlohmann::ordered_json product_json(const cuda::TensorCoreTuning& tuning);
nlohmann::ordered_json plan_json(const cuda::TensorCorePlan& plan);

/// "nvidia-h100-80gb-hbm3-cuda.json".
std::string cuda_profile_file_name(const CudaMachine& machine);

/// nullopt: there is no such file. Throws Error when it cannot be read, is damaged, or was made by another version, on
/// another card or with another driver.
std::optional<CudaProfile> load_cuda_profile(const std::string& path, const CudaMachine& here);
/// Makes the folder and replaces the file at once.
void save_cuda_profile(const std::string& path, const CudaProfile& profile);

}  // namespace lacuna::calibrate
