#include "solver/project.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "solver/threads.h"

namespace lacuna::solver {
namespace {

/// keep_largest on the CPU, contiguous, 0 < dropped < L.
at::Tensor keep_largest_cpu(const at::Tensor& score, int64_t dropped) {
  const int64_t R = score.size(0), L = score.size(1);
  at::Tensor keep = at::empty({R, L}, score.options().dtype(at::kBool));
  const float* from = score.data_ptr<float>();
  bool* to = keep.data_ptr<bool>();
  for_parts(R, R * L, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> sorted(static_cast<size_t>(L));
    for (int64_t r = begin; r < end; ++r) {
      const float* row = from + r * L;
      std::copy_n(row, L, sorted.begin());
      std::nth_element(sorted.begin(), sorted.begin() + dropped, sorted.end());
      const float last = sorted[size_t(dropped)];  // the smallest that stays
      // Behind it are those not smaller: as many places as are not taken by larger ones are for the first equal ones.
      int64_t room = std::count(sorted.begin() + dropped, sorted.end(), last);
      for (int64_t k = 0; k < L; ++k) {
        const bool equal = row[k] == last;
        to[r * L + k] = row[k] > last || (equal && room > 0);
        room -= equal;
      }
    }
  });
  return keep;
}

/// score: [N, G, m] -> which n of the last dimension are largest.
at::Tensor keep_n_of_m(const at::Tensor& score, int64_t n) {
  const int64_t m = score.size(2);
  at::Tensor better = at::zeros(score.sizes(), score.options().dtype(at::kShort));  // how many come before each
  for (int64_t i = 0; i < m; ++i) {
    const at::Tensor one = score.narrow(2, i, 1);
    if (i > 0) better.narrow(2, 0, i).add_(one > score.narrow(2, 0, i));
    if (i + 1 < m) better.narrow(2, i + 1, m - i - 1).add_(one >= score.narrow(2, i + 1, m - i - 1));
  }
  return better < n;
}

}  // namespace

int64_t floor_share(double share, int64_t count) {
  return std::clamp(int64_t(std::floor(share * double(count) + 1e-6)), int64_t{0}, count);
}

at::Tensor keep_largest(const at::Tensor& score, int64_t dropped) {
  const int64_t length = score.size(1), kept = length - dropped;
  if (dropped <= 0) return at::ones(score.sizes(), score.options().dtype(at::kBool));
  if (kept <= 0) return at::zeros(score.sizes(), score.options().dtype(at::kBool));
  if (score.device().is_cpu()) return keep_largest_cpu(score.contiguous(), dropped);
  // One long row is sorted: the selection kernel gives a row to one block of threads.
  const at::Tensor last = score.size(0) == 1 ? std::get<0>(score.sort(1)).narrow(1, dropped, 1)
                                             : std::get<0>(at::kthvalue(score, dropped + 1, 1, true));
  const at::Tensor larger = score > last;
  at::Tensor equal = score == last;
  const at::Tensor room = kept - larger.sum(1, true);  // >= 1
  if ((equal.sum(1, true) > room).any().item<bool>()) equal = equal.logical_and(equal.cumsum(1) <= room);
  return larger.logical_or_(equal);
}

at::Tensor keep_mask(const at::Tensor& score, const Pattern& pattern) {
  const int64_t N = score.size(0), K = score.size(1);
  switch (pattern.kind) {
    case Pattern::Kind::none:
      break;
    case Pattern::Kind::row:
      return keep_largest(score, floor_share(pattern.sparsity, K));
    case Pattern::Kind::unstructured:
      return keep_largest(score.reshape({1, N * K}), floor_share(pattern.sparsity, N * K)).reshape({N, K});
    case Pattern::Kind::n_m: {
      const int64_t groups = (K + pattern.m - 1) / pattern.m;
      const at::Tensor filled = at::constant_pad_nd(score, {0, groups * pattern.m - K}, -1);
      return ungrouped(keep_n_of_m(filled.reshape({N, groups, pattern.m}), pattern.n), K);
    }
    case Pattern::Kind::groups: {
      const at::Tensor energy = grouped(score, pattern.group).square().sum(2);  // [N, groups]
      const int64_t groups = energy.size(1);
      const at::Tensor keep = keep_largest(energy.reshape({1, N * groups}), floor_share(pattern.sparsity, N * groups));
      return ungrouped(keep.reshape({N, groups, 1}).expand({N, groups, std::min(pattern.group, K)}), K);
    }
  }
  return at::ones(score.sizes(), score.options().dtype(at::kBool));
}

Pattern ramped(const Pattern& pattern, double share) {
  Pattern on_the_way = pattern;
  on_the_way.sparsity = pattern.sparsity * share;
  if (pattern.kind == Pattern::Kind::n_m) on_the_way.n = pattern.m - floor_share(share, pattern.m - pattern.n);
  return on_the_way;
}

at::Tensor grouped(const at::Tensor& w, int64_t size) {
  const int64_t N = w.size(0), K = w.size(1);
  size = std::min(size, std::max<int64_t>(K, 1));
  const int64_t groups = (K + size - 1) / size;
  if (groups * size == K) return w.reshape({N, groups, size});
  return at::constant_pad_nd(w, {0, groups * size - K}).reshape({N, groups, size});
}

at::Tensor ungrouped(const at::Tensor& groups, int64_t K) {
  return groups.reshape({groups.size(0), groups.size(1) * groups.size(2)}).narrow(1, 0, K).contiguous();
}

Affine fit_range(const at::Tensor& low, const at::Tensor& high, const Grid& grid) {
  const float codes = float((1 << grid.bits) - 1), half = float(1 << (grid.bits - 1));
  const at::Tensor bottom = low.clamp_max(0), top = high.clamp_min(0), range = top - bottom;
  const at::Tensor exact = grid.symmetric ? at::maximum(top / (half - 1), bottom / -half) : range / codes;
  const at::Tensor scale = exact.to(at::kHalf).to(at::kFloat);
  if (!scale.isfinite().all().item<bool>()) {
    if (grid.symmetric)
      throw Error(
          "a group's weights reach from {} to {}, but scales are stored as f16: with {} bits and symmetric grids they "
          "can reach from {} to {}",
          bottom.min().item<float>(), top.max().item<float>(), grid.bits, -65504.0f * half, 65504.0f * (half - 1));
    throw Error("a group's weights span {}, but scales are stored as f16: with {} bits they can span {} at most",
                range.max().item<float>(), grid.bits, 65504.0f * codes);
  }
  if (grid.symmetric) return {scale, at::full_like(scale, half)};
  const at::Tensor empty = scale == 0;
  const at::Tensor zero = (bottom.neg() / scale.masked_fill(empty, 1)).round_().clamp_(0, codes).masked_fill_(empty, 0);
  return {scale, zero};
}

Affine fit_grid(const at::Tensor& W, const Grid& grid, const at::Tensor& limit) {
  const at::Tensor groups = grouped(W, grid.group(W.size(1)));
  at::Tensor low = groups.amin({2}), high = groups.amax({2});
  if (limit.defined()) {
    low = at::maximum(low, limit.neg());
    high = at::minimum(high, limit);
  }
  return fit_range(low, high, grid);
}

at::Tensor nearest_code(const at::Tensor& w, const Affine& affine, int bits) {
  const at::Tensor step = affine.scale.masked_fill(affine.scale == 0, 1);
  return (w / step).round_().add_(affine.zero).clamp_(0, (1 << bits) - 1);
}

Rounded round_to_grid(const at::Tensor& W, const Grid& grid, const Affine& affine) {
  const Affine wide{affine.scale.unsqueeze(2), affine.zero.unsqueeze(2)};
  const at::Tensor code = nearest_code(grouped(W, grid.group(W.size(1))), wide, grid.bits);
  return {ungrouped(code, W.size(1)), affine};
}

at::Tensor decode(const Rounded& rounded, const Grid& grid) {
  const int64_t K = rounded.code.size(1);
  const at::Tensor steps = grouped(rounded.code, grid.group(K)) - rounded.affine.zero.unsqueeze(2);
  return ungrouped(steps.mul_(rounded.affine.scale.unsqueeze(2)), K);
}

at::Tensor masked(const at::Tensor& w, const at::Tensor& keep) {
  return keep.defined() ? at::where(keep, w, at::zeros({}, w.options())) : w;
}

Solution stored(const Rounded& rounded, const Grid& grid, const at::Tensor& keep) {
  Solution solution;
  solution.weight = masked(decode(rounded, grid), keep).contiguous();
  solution.keep = keep;
  solution.code = masked(rounded.code, keep).to(at::kByte).contiguous();
  solution.scale = rounded.affine.scale.contiguous();
  solution.zero = rounded.affine.zero.contiguous();
  return solution;
}

Solution stored(const at::Tensor& W, const at::Tensor& keep) {
  Solution solution;
  solution.weight = masked(W, keep).contiguous();
  solution.keep = keep;
  return solution;
}

}  // namespace lacuna::solver
