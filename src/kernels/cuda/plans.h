// src/kernels/cuda/plans.h - plans of zigzag and group-sparse products that were measured on a device. Plain C++.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"
#include "layout/layout.h"

namespace lacuna::cuda {

/// Zigzag products that one plan is for.
struct Product {
  layout::Id layout = layout::Id::zz4_k;
  int64_t rows = 0, K = 0;  // superblock rows
  int percent = 0;          // of the inputs that are left out; 0: dense

  bool operator==(const Product&) const = default;
  bool operator<(const Product& other) const {
    return std::tie(layout, rows, K, percent) < std::tie(other.layout, other.rows, other.K, other.percent);
  }
};
/// "zz4_k 86 x 4096, 50%".
std::string describe(const Product& product);

/// Group-sparse products that one plan is for.
struct GroupsProduct {
  layout::Id layout = layout::Id::gs4;
  int64_t rows = 0, K = 0;  // rows: panels of 256 outputs
  int64_t group = 16;
  int kept = 100;  // of the groups, in percent

  /// Whether prepare_groups() makes units of the weights.
  bool are_units() const;

  bool operator==(const GroupsProduct&) const = default;
  bool operator<(const GroupsProduct& other) const {
    return std::tie(layout, rows, K, group, kept) <
           std::tie(other.layout, other.rows, other.K, other.group, other.kept);
  }
};
/// "gs4 48 x 4096, groups of 16, 50% kept".
std::string describe(const GroupsProduct& product);
/// Throws Error, naming product and plan, for a plan that launch_groups() does not take for any such weights.
void check_plan(const GroupsProduct& product, const GroupsPlan& plan);

class Plans {
 public:
  void set(const Product& product, const GemvPlan& plan) { plans_[product] = plan; }
  void set(const GroupsProduct& product, const GroupsPlan& plan) { of_groups_[product] = plan; }
  /// The plan of this product, else of the same one at the nearest other sparsity; nullptr where there is none: dense
  /// products have no other, and that skipping does not pay at some sparsity says nothing of a higher one (of a lower
  /// one it does).
  const GemvPlan* find(const Product& product) const;
  /// The plan of this product, else of the same one with the nearest other share of its groups kept, whose blocks may
  /// have to be fitted() to the weights; nullptr where there is none.
  const GroupsPlan* find_groups(const GroupsProduct& product) const;
  bool empty() const { return plans_.empty() && of_groups_.empty(); }

 private:
  std::map<Product, GemvPlan> plans_;
  std::map<GroupsProduct, GroupsPlan> of_groups_;
};

}  // namespace lacuna::cuda
