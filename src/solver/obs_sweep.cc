#include "solver/obs_sweep.h"

#include <algorithm>
#include <vector>

namespace lacuna::solver {
namespace {

/// Columns over which a mask is chosen at once.
int64_t mask_unit(const Pattern& pattern, int64_t K, int64_t block) {
  switch (pattern.kind) {
    case Pattern::Kind::n_m:
      return pattern.m;
    case Pattern::Kind::groups: {
      const int64_t group = std::min(pattern.group, K);
      return std::max<int64_t>(block / group, 1) * group;
    }
    default:
      return block;
  }
}

}  // namespace

int64_t block_end(int64_t first, int64_t K, int64_t block, std::span<const int64_t> units) {
  const auto cut = [&](int64_t end) {  // whether a unit that starts behind `first` would be cut
    return std::any_of(units.begin(), units.end(), [&](int64_t unit) {
      const int64_t last = (end - 1) / unit * unit;
      return last > first && std::min(last + unit, K) > end;
    });
  };
  int64_t end = std::min(first + block, K);
  while (cut(end)) --end;
  return end;
}

SweepMask::SweepMask(int64_t N, const at::Tensor& U, const at::Tensor& dead, const Pattern& pattern, int64_t block)
    : keep_t(at::ones({U.size(0), N}, U.options().dtype(at::kBool))),
      pattern_(pattern),
      unit_(mask_unit(pattern, U.size(0), block)),
      importance_(U.diagonal().reciprocal().masked_fill(dead, 0).unsqueeze(1)) {}

void SweepMask::begin(int64_t k, const at::Tensor& Wt) {
  if (k % unit_ != 0) return;
  const int64_t K = Wt.size(0), N = Wt.size(1), length = std::min(unit_, K - k);
  const at::Tensor score = (Wt.narrow(0, k, length).abs() * importance_.narrow(0, k, length)).t().contiguous();
  // Counts that add up to the pattern's over the matrix: what is to be dropped up to the unit's end, less what is gone.
  const auto share = [&](int64_t of_one_column) {
    return floor_share(pattern_.sparsity, of_one_column * (k + length)) -
           floor_share(pattern_.sparsity, of_one_column * k);
  };
  at::Tensor keep;
  switch (pattern_.kind) {
    case Pattern::Kind::row:
      keep = keep_largest(score, share(1));
      break;
    case Pattern::Kind::unstructured:
      keep = keep_largest(score.reshape({1, N * length}), share(N)).reshape({N, length});
      break;
    case Pattern::Kind::groups: {
      const int64_t group = std::min(pattern_.group, K), before = k / group, after = (k + length + group - 1) / group;
      const at::Tensor energy = grouped(score, group).square().sum(2);
      const int64_t dropped = floor_share(pattern_.sparsity, N * after) - floor_share(pattern_.sparsity, N * before);
      const at::Tensor whole = keep_largest(energy.reshape({1, energy.numel()}), dropped);
      keep = ungrouped(whole.reshape({N, after - before, 1}).expand({N, after - before, group}), length);
      break;
    }
    default:
      keep = keep_mask(score, pattern_);
  }
  keep_t.narrow(0, k, length).copy_(keep.t());
}

SweepGrid::SweepGrid(int64_t N, int64_t K, const Grid& grid, const at::Tensor& like, const at::Tensor& importance)
    : grid_(grid),
      group_(grid.group(K)),
      importance_(importance.defined() ? importance.unsqueeze(1) : importance),
      code_(at::empty({K, N}, like.options())),
      scale_(at::empty({grid.groups(K), N}, like.options())),
      zero_(at::empty_like(scale_)),
      step_(at::empty_like(scale_)) {}

Affine SweepGrid::fit(const at::Tensor& w, const at::Tensor& importance) const {
  const at::Tensor low = w.amin({0}), high = w.amax({0});
  Affine best = fit_range(low, high, grid_);
  if (!importance.defined()) return best;
  at::Tensor least;
  for (int i = 0; i <= 16; ++i) {
    const double share = 1 - 0.05 * i;
    const Affine tried = i == 0 ? best : fit_range(low * share, high * share, grid_);
    const at::Tensor value = nearest_code(w, tried, grid_.bits).sub_(tried.zero).mul_(tried.scale);
    const at::Tensor lost = (w - value).square_().mul_(importance).sum(0);
    if (i == 0) {
      least = lost;
      continue;
    }
    const at::Tensor better = lost < least;
    least = at::where(better, lost, least);
    best.scale = at::where(better, tried.scale, best.scale);
    best.zero = at::where(better, tried.zero, best.zero);
  }
  return best;
}

void SweepGrid::begin(int64_t k, const at::Tensor& Wt, const at::Tensor& keep_t) {
  if (k % group_ != 0) return;
  const int64_t length = std::min(group_, Wt.size(0) - k);
  at::Tensor w = Wt.narrow(0, k, length);
  if (keep_t.defined()) w = masked(w, keep_t.narrow(0, k, length));
  const Affine affine = fit(w, importance_.defined() ? importance_.narrow(0, k, length) : at::Tensor());
  scale_.select(0, k / group_).copy_(affine.scale);
  zero_.select(0, k / group_).copy_(affine.zero);
  step_.select(0, k / group_).copy_(affine.scale.masked_fill(affine.scale == 0, 1));
}

ColumnRule SweepGrid::rule(int64_t k) const {
  const int64_t g = k / group_;
  return {scale_.select(0, g), zero_.select(0, g), step_.select(0, g), grid_.bits, {}};
}

Rounded SweepGrid::rounded() const {
  return {code_.t().contiguous(), {scale_.t().contiguous(), zero_.t().contiguous()}};
}

at::Tensor obs_sweep(at::Tensor Wt, const at::Tensor& U, int64_t block, SweepMask* mask, SweepGrid* grid,
                     const at::Tensor& keep_t) {
  const int64_t K = Wt.size(0), N = Wt.size(1);
  const at::Tensor share = (U / U.diagonal().unsqueeze(1)).contiguous();  // [k, j]: what column j takes of k's error
  const at::Tensor keep = mask != nullptr ? mask->keep_t : keep_t;
  std::vector<int64_t> units;
  if (mask != nullptr) units.push_back(mask->unit());
  if (grid != nullptr) units.push_back(grid->unit());
  at::Tensor Q = at::empty_like(Wt);
  const at::Tensor left = at::empty({std::min(block, K), N}, Wt.options());
  for (int64_t first = 0; first < K;) {
    const int64_t end = block_end(first, K, std::min(block, kMostBlockColumns), units), B = end - first;
    const auto here = [&](const at::Tensor& t) { return t.narrow(0, first, B); };
    const ColumnBlock columns{here(Wt),
                              here(share).narrow(1, first, B),
                              here(Q),
                              left.narrow(0, 0, B),
                              grid != nullptr ? here(grid->code()) : at::Tensor(),
                              {}};
    for (int64_t k = first; k < end;) {
      int64_t last = end;  // up to where no unit starts
      for (const int64_t unit : units) last = std::min(last, (k / unit + 1) * unit);
      if (mask != nullptr) mask->begin(k, Wt);
      if (grid != nullptr) grid->begin(k, Wt, keep);
      ColumnRule rule = grid != nullptr ? grid->rule(k) : ColumnRule{};
      if (keep.defined()) rule.keep = here(keep);
      fix_columns(columns, k - first, last - first, rule);
      k = last;
    }
    if (end < K) Wt.narrow(0, end, K - end).addmm_(here(share).narrow(1, end, K - end).t(), columns.left, 1, -1);
    first = end;
  }
  return Q;
}

}  // namespace lacuna::solver
