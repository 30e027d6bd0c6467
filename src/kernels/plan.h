// src/kernels/plan.h - how one token is multiplied with a group of zigzag weights on this machine. `lacuna tune`
// measures plans; every plan gives a correct result, results of two plans differ by rounding only.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace lacuna::kernels {

struct WeightView;

struct Plan {
  /// What the workers share out.
  enum class Split : uint8_t {
    columns,  // the active columns: each worker keeps sums of its own, which are added at the end
    rows,     // the outputs: each worker reads its rows of every active column. The result does not depend on the
              // number of workers.
  };
  Split split = Split::columns;
  /// Columns whose factors are rounded together and which are in flight at a time: 16, 32, 48 or 64.
  int chunk = 32;
  /// Whether the next chunk's columns are prefetched.
  bool prefetch = true;
  /// Outputs of a tile of the prepared form, in which columns are contiguous; a multiple of 256. 0: all outputs.
  int64_t tile_rows = 0;
  /// Where a smaller share of the inputs than this is left out, the model runs the input dense: skipping is slower.
  double dense_below = 0;

  bool operator==(const Plan&) const = default;
};

std::string_view name_of(Plan::Split split);
/// Throws Error naming the field, its value and what is allowed.
void check_plan(const Plan& plan);
/// "columns, 32 at a time, prefetch, whole columns": for messages.
std::string describe(const Plan& plan);

/// The group that a plan is for: "zz4_k 1536+256+256 x 1536", outputs of its parts by layout, then inputs.
std::string plan_key(std::span<const WeightView> parts);

/// Plans by plan_key.
class Plans {
 public:
  void set(const std::string& key, const Plan& plan) { plans_[key] = plan; }
  /// The default plan where none was measured.
  Plan of(std::span<const WeightView> parts) const;
  const std::map<std::string, Plan>& all() const { return plans_; }

 private:
  std::map<std::string, Plan> plans_;
};

}  // namespace lacuna::kernels
