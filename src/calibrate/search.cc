#include "calibrate/search.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lacuna::calibrate {
namespace {

using model::Block;
using model::kInputs;
using model::kMatrices;
using model::Matrix;

Block::Mask mask_of(Matrix matrix, double share, const std::array<Histogram, kInputs>& sizes,
                    const std::array<std::vector<float>, kInputs>* norms, int64_t group) {
  const auto input = size_t(input_of(matrix));
  return {sizes[input].quantile(share), norms ? (*norms)[input].data() : nullptr, group};
}

}  // namespace

std::vector<SearchPoint> search_block(BlockTrials& block, const std::array<Histogram, kInputs>& sizes,
                                      const std::array<std::vector<float>, kInputs>* norms, double until,
                                      const SearchOptions& options) {
  double total = 0;
  for (int64_t m = 0; m < kMatrices; ++m) total += double(block.weight_bytes(Matrix(m)));
  Block::Masks masks{};
  block.restart();

  std::array<double, kMatrices> share = {}, cost = {};  // cost: error for each byte, when last tried
  std::array<bool, kMatrices> fresh = {};
  cost.fill(-1);  // all are tried first
  const auto weight = [&](size_t m) { return double(block.weight_bytes(Matrix(m))) / total; };
  const auto raise = [&](size_t m) { return std::min({1 - share[m], options.matrix_step, options.step / weight(m)}); };
  const auto point = [&](double error) {
    SearchPoint out;
    std::array<double, kInputs> bytes = {};
    for (size_t m = 0; m < size_t(kMatrices); ++m) {
      if (!block.has(Matrix(m))) continue;
      const auto input = size_t(input_of(Matrix(m)));
      out.share[input] += share[m] * weight(m);
      bytes[input] += weight(m);
      out.sparsity += share[m] * weight(m);
    }
    for (size_t i = 0; i < size_t(kInputs); ++i) out.share[i] /= bytes[i];
    out.error = error;
    return out;
  };

  std::vector<SearchPoint> path = {point(0)};
  double error = 0;
  while (path.back().sparsity < until) {
    size_t best = size_t(kMatrices);
    for (;;) {  // until the cheapest candidate is one that was tried in this step
      best = size_t(kMatrices);
      for (size_t m = 0; m < size_t(kMatrices); ++m) {
        if (!block.has(Matrix(m)) || raise(m) < 1e-9) continue;
        if (options.exhaustive && !fresh[m]) {
          best = m;
          break;
        }
        if (best == size_t(kMatrices) || cost[m] < cost[best]) best = m;
      }
      if (best == size_t(kMatrices) || fresh[best]) break;
      Block::Masks tried = masks;
      tried[best] = mask_of(Matrix(best), share[best] + raise(best), sizes, norms, options.group);
      cost[best] = (block.error(Matrix(best), tried, false) - error) / (raise(best) * weight(best));
      fresh[best] = true;
    }
    if (best == size_t(kMatrices)) break;  // everything is left out
    share[best] += raise(best);
    masks[best] = mask_of(Matrix(best), share[best], sizes, norms, options.group);
    error = block.error(Matrix(best), masks, true);
    path.push_back(point(error));
    fresh.fill(false);
  }
  return path;
}

SearchPoint point_at(const std::vector<SearchPoint>& path, double sparsity) {
  const auto after =
      std::find_if(path.begin(), path.end(), [&](const SearchPoint& p) { return p.sparsity >= sparsity; });
  if (after == path.end()) return path.back();
  if (after == path.begin()) return path.front();
  const SearchPoint &a = *(after - 1), &b = *after;
  const double part = (sparsity - a.sparsity) / (b.sparsity - a.sparsity);
  SearchPoint out;
  out.sparsity = sparsity;
  for (size_t i = 0; i < size_t(kInputs); ++i) out.share[i] = a.share[i] + part * (b.share[i] - a.share[i]);
  out.error = a.error + part * (b.error - a.error);
  return out;
}

double block_error(Block& block, const float* x, const std::array<Histogram, kInputs>& sizes,
                   const std::array<std::vector<float>, kInputs>* norms, const std::array<double, kInputs>& share,
                   int64_t dense_prefix) {
  Block::Pass dense, sparse;
  block.run(x, {}, dense_prefix, dense);
  Block::Masks masks{};
  for (size_t m = 0; m < size_t(kMatrices); ++m)
    masks[m] = mask_of(Matrix(m), share[size_t(input_of(Matrix(m)))], sizes, norms, 1);
  block.run(x, masks, dense_prefix, sparse);
  return squared_distance(sparse.out, dense.out.data()) /
         std::max(squared_distance(dense.out, x), std::numeric_limits<double>::min());
}

}  // namespace lacuna::calibrate
