// src/solver/project.h - the sets that solvers project on: patterns of dropped weights, grids of integers, and both.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>

#include "solver/problem.h"

namespace lacuna::solver {

/// floor(share * count), exact where share * count is a whole number that doubles miss by an ulp.
int64_t floor_share(double share, int64_t count);

/// Which weights stay, [N, K] bool: those of the largest scores that the pattern allows; of equal scores the one with
/// the lower index stays. score: [N, K], >= 0, of the kind of |w|: groups are ranked by their sum of squares, so that
/// with |w| itself the mask is the Euclidean projection's. n_m: a last group of fewer than m keeps at most n too.
at::Tensor keep_mask(const at::Tensor& score, const Pattern& pattern);

/// As keep_mask for a matrix of its own rows with `dropped` of each row gone; score: [R, L].
at::Tensor keep_largest(const at::Tensor& score, int64_t dropped);

/// The pattern on the way from nothing dropped (share 0) to itself (share 1).
Pattern ramped(const Pattern& pattern, double share);

/// [N, K] -> [N, groups, size]; a last partial group is filled with zeros.
at::Tensor grouped(const at::Tensor& w, int64_t size);
/// The inverse: drops what was filled in.
at::Tensor ungrouped(const at::Tensor& groups, int64_t K);

/// weight = scale * (code - zero).
struct Affine {
  at::Tensor scale, zero;  // both f16 values held in float32, zero whole; one shape
};

/// The grid over [min(low, 0), max(high, 0)]: scale = (max - min) / (2^bits - 1) rounded to f16, zero = round(-min /
/// scale) clamped to the codes, so that 0 is on every grid. Symmetric grids: zero = h = 2^(bits - 1), the least scale
/// that holds both ends, max(max / (h - 1), -min / h). A range that f16 rounds to nothing gets scale 0 and decodes to
/// 0. Throws Error where the scale is past f16.
Affine fit_range(const at::Tensor& low, const at::Tensor& high, const Grid& grid);

/// The grid of every group of W; limit: [N, groups] or undefined, |w| is taken no larger than it. -> [N, groups]
Affine fit_grid(const at::Tensor& W, const Grid& grid, const at::Tensor& limit = {});

/// Nearest codes (ties to even) as float32. w and the affine's tensors broadcast.
at::Tensor nearest_code(const at::Tensor& w, const Affine& affine, int bits);

/// A matrix on a grid.
struct Rounded {
  at::Tensor code;  // [N, K] float32
  Affine affine;    // [N, groups]
};
Rounded round_to_grid(const at::Tensor& W, const Grid& grid, const Affine& affine);
at::Tensor decode(const Rounded& rounded, const Grid& grid);  // [N, K]

/// The solution that stores these codes without the dropped weights; keep may be undefined.
Solution stored(const Rounded& rounded, const Grid& grid, const at::Tensor& keep);
/// The solution that stores plain values.
Solution stored(const at::Tensor& W, const at::Tensor& keep);

/// w where it is kept, +0 elsewhere; all of w where keep is undefined.
at::Tensor masked(const at::Tensor& w, const at::Tensor& keep);

}  // namespace lacuna::solver
