// src/kernels/cuda/plans.h - plans of the zigzag products that were measured on a device. Plain C++.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "kernels/cuda/gemv.h"
#include "layout/layout.h"

namespace lacuna::cuda {

/// Products that one plan is for.
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

class Plans {
 public:
  void set(const Product& product, const GemvPlan& plan) { plans_[product] = plan; }
  /// The plan of this product, else of the same one at the nearest other sparsity; nullptr where there is none: dense
  /// products have no other, and that skipping does not pay at some sparsity says nothing of a higher one (of a lower
  /// one it does).
  const GemvPlan* find(const Product& product) const;
  bool empty() const { return plans_.empty(); }

 private:
  std::map<Product, GemvPlan> plans_;
};

}  // namespace lacuna::cuda
