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
  /// How many superblocks of a column lie between the one that is multiplied and the one that is asked for; near a
  /// column's end those of the next chunk's columns are. kColumn: always the next chunk's. 0: nothing is asked for.
  int prefetch = kColumn;
  static constexpr int kColumn = 65535;
  /// Outputs of a tile of the prepared form, in which columns are contiguous; a multiple of 256. 0: all outputs.
  int64_t tile_rows = 0;
  /// Where a smaller share of the inputs than this is left out, the model runs the input dense: skipping is slower.
  double dense_below = 0;

  bool operator==(const Plan&) const = default;
};

/// What runs where nothing was measured. On AMD's CPUs, whose second-level caches hold 1 MiB at most, 64 columns and
/// four superblocks ahead: whole columns ahead push out what is about to be read. On others what was measured on a Xeon
/// with 2 MiB, 32 columns and whole ones ahead.
Plan default_plan();

std::string_view name_of(Plan::Split split);
/// Throws Error naming the field, its value and what is allowed.
void check_plan(const Plan& plan);
/// "columns, 32 at a time, 4 superblocks ahead, whole columns": for messages.
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
