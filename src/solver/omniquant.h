// src/solver/omniquant.h - where OmniQuant's learnable weight clipping (arXiv:2308.13137, section 3.2) begins and ends:
// rounding to nearest on grids that cover a share of what each group's weights span. What learns the shares needs a
// whole layer: compress/omniquant.h.
#pragma once

#include "solver/project.h"
#include "solver/solve.h"

namespace lacuna::solver {

/// What strengths are before they are learned; the share of a range is sigmoid(strength), 0.982 of it.
inline constexpr double kFirstStrength = 4;

/// The ends of every group's weights, 0 among them: [N, groups, 1].
struct Range {
  at::Tensor low, high;
};
Range range_of(const at::Tensor& W, const Grid& grid);

/// W rounded to nearest on the grids over [low, high] of its groups, which are within what the weights span. unrounded
/// is W clamped to them, on which fit_grid finds the same grids.
Solution round_on_range(const at::Tensor& W, const Range& range, const Grid& grid);

/// As it is before anything is learned: every end sigmoid(kFirstStrength) of its group's.
Solution omniquant(const Problem& problem);

}  // namespace lacuna::solver
