#include "kernels/cuda/plans.h"

#include <cstdlib>

#include "core/error.h"

namespace lacuna::cuda {

std::string describe(const Product& product) {
  return fmt::format("{} {} x {}{}", layout::get(product.layout).name, product.rows, product.K,
                     product.percent == 0 ? ", dense" : fmt::format(", {}%", product.percent));
}

const GemvPlan* Plans::find(const Product& product) const {
  const GemvPlan* best = nullptr;
  int distance = 0;
  for (const auto& [other, plan] : plans_) {
    if (other.layout != product.layout || other.rows != product.rows || other.K != product.K) continue;
    if ((other.percent == 0) != (product.percent == 0)) continue;
    if (!plan.skips && other.percent < product.percent) continue;
    const int far = std::abs(other.percent - product.percent);
    if (best == nullptr || far < distance) best = &plan, distance = far;
  }
  return best;
}

}  // namespace lacuna::cuda
