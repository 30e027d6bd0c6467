// src/calibrate/cold_group.h - one group of zigzag weights, many times in memory, so that every plan can be run on
// weights that no cache holds.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/linear.h"

namespace lacuna::calibrate {

class ColdGroup {
 public:
  /// layers: the same group of several layers, of which prepared copies are made in turn. levels: shares of inactive
  /// inputs. cold_bytes: of copies in each tile form.
  ColdGroup(std::vector<std::vector<kernels::WeightView>> layers, std::span<const double> levels, int64_t cold_bytes,
            ThreadPool& pool);

  /// Superblock rows.
  int64_t rows() const { return rows_; }
  /// Makes the copies for these plans, once for plans of equal tile_rows, and compares every plan's results, dense and
  /// at all levels, with the first plan's. Throws Error naming the plan whose results differ by more than rounding.
  void prepare(std::span<const kernels::Plan> plans);
  /// Frees the copies that these plans do not need.
  void keep(std::span<const kernels::Plan> plans);
  /// Milliseconds of one token, the mean over the next copies, of which so many are taken that it is about half a
  /// millisecond. level: index of the levels; -1: dense.
  double time_ms(const kernels::Plan& plan, int level);

 private:
  /// Random inputs and, for each level, the threshold that leaves that share of them out; 0 for level 0: every input is
  /// on the list.
  struct Input {
    std::vector<float> x, thresholds;
  };
  /// All copies in one tile form.
  struct Form {
    std::vector<std::unique_ptr<kernels::LinearGroup>> copies;
    size_t next = 0;
  };

  Form make_form(const kernels::Plan& plan) const;
  void run(kernels::LinearGroup& group, const Input& input, int level);
  /// Of the first layer's weights, dense and at each level, all outputs one after the other.
  std::vector<std::vector<float>> results(const kernels::Plan& plan);

  ThreadPool& pool_;
  std::vector<std::vector<kernels::WeightView>> layers_;
  std::vector<Input> inputs_;
  int levels_ = 0;
  int64_t K_ = 0, rows_ = 0;
  size_t copies_ = 0, batch_ = 1;
  std::map<int64_t, Form> forms_;  // by tile_rows
  std::vector<int32_t> active_;
  std::vector<std::vector<float>> y_;  // of each part
  std::vector<kernels::Output> outputs_;
};

}  // namespace lacuna::calibrate
