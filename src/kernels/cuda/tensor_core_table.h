// src/kernels/cuda/tensor_core_table.h - plans of the wgmma kernel (tensor_core.h) that were measured on a device.
// Plain C++.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// Products that one plan is for.
struct TensorCoreProduct {
  Operation operation;
  Accumulate accumulate = Accumulate::fast;  // bf16, which has one kind of sums: fast
  int64_t N = 0, K = 0;                      // N: of a group
  int groups = 0;                            // 0: one product of all tokens
  int64_t M = 0;                             // tokens of all groups

  friend bool operator==(const TensorCoreProduct&, const TensorCoreProduct&) = default;
  friend bool operator<(const TensorCoreProduct& a, const TensorCoreProduct& b) { return a.order() < b.order(); }

 private:
  std::tuple<bool, bool, Accumulate, int64_t, int64_t, int, int64_t> order() const {
    return {operation.eight_bits, operation.sparse, accumulate, N, K, groups, M};
  }
};
/// "nm24_f8 4608 x 21504 x 3072" (tokens, outputs, inputs), "f8 65536 x 2048 x 2048, 32 groups, full accumulation".
std::string describe(const TensorCoreProduct& product);
/// The layout of an operation's weights.
const layout::Layout& layout_of(Operation operation);
/// "128 outputs x 192 tokens, clusters of 2".
std::string describe(const TensorCorePlan& plan);

/// What was measured of a product: microseconds with default_plan's plan and with this one.
struct TensorCoreTuning {
  TensorCoreProduct product;
  TensorCorePlan plan;
  double standard_us = 0, tuned_us = 0;
  friend bool operator==(const TensorCoreTuning&, const TensorCoreTuning&) = default;
};

/// Tokens differ from those of a measured product by at most this factor where its plan is taken for others.
inline constexpr double kMostTokenRatio = 1.25;

class TensorCoreTable {
 public:
  /// What was known of the product is replaced.
  void set(const TensorCoreTuning& tuning) { tunings_[tuning.product] = tuning; }
  /// Of the products that differ in tokens alone, the one whose number is nearest (by ratio, of two equally near ones
  /// that of more tokens), within kMostTokenRatio; nullptr where there is none. Good until set().
  const TensorCoreTuning* find(const TensorCoreProduct& product) const;
  /// Throws Error, beginning with `where`, naming the first product whose plan the kernel of this build does not have.
  void check_plans(std::string_view where) const;

  const std::map<TensorCoreProduct, TensorCoreTuning>& tunings() const { return tunings_; }
  bool empty() const { return tunings_.empty(); }
  friend bool operator==(const TensorCoreTable&, const TensorCoreTable&) = default;

 private:
  std::map<TensorCoreProduct, TensorCoreTuning> tunings_;
};

/// The product that launch_tensor_core runs by a plan of the wgmma kernel; nullopt where it takes none: another kernel,
/// float32 results, a write-back other than staged. args.plan is not looked at.
std::optional<TensorCoreProduct> planned_product(const DeviceInfo& device, const TensorCoreArgs& args);

/// The table's plan of these arguments' product; nullptr where there is none: default_plan's is then the one.
const TensorCorePlan* find_plan(const TensorCoreTable& table, const DeviceInfo& device, const TensorCoreArgs& args);

/// explain_tensor_core of what runs with find_plan's plan and, where a plan is taken, where it comes from.
std::string explain_tensor_core(const DeviceInfo& device, TensorCoreArgs args, const TensorCoreTable& table);

}  // namespace lacuna::cuda
