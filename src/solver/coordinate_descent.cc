#include "solver/coordinate_descent.h"

#include <algorithm>

#include "solver/columns.h"

namespace lacuna::solver {
namespace {

/// Columns over which gradients are kept up to date one by one.
constexpr int64_t kBlock = 64;

/// Everything transposed, so that what one column of all rows needs is contiguous.
class Codes {
 public:
  Codes(const at::Tensor& W, const at::Tensor& C, const Grid& grid, const Rounded& start, const at::Tensor& keep)
      : grid_(grid),
        K_(W.size(1)),
        group_(grid.group(K_)),
        Wt_(W.t().contiguous()),
        C_(C),
        code_(start.code.t().clone(at::MemoryFormat::Contiguous)),
        scale_(start.affine.scale.t().clone(at::MemoryFormat::Contiguous)),
        step_(scale_.masked_fill(scale_ == 0, 1)),
        zero_(start.affine.zero.t().contiguous()),
        keep_(keep.defined() ? keep.t().contiguous() : at::Tensor()),
        Q_(masked(decode(start, grid), keep).t().contiguous()) {
    const at::Tensor diagonal = C.diagonal(), dead = diagonal <= 0;  // dead inputs stay as they are
    inverse_diagonal_ = diagonal.masked_fill(dead, 1).reciprocal().masked_fill(dead, 0).contiguous();
  }

  /// Whether a code changed.
  bool pass() {
    const at::Tensor before = code_.clone();
    gradient_ = C_.matmul(Wt_ - Q_);
    const at::Tensor changes = at::empty({std::min(kBlock, K_), Q_.size(1)}, Q_.options());
    for (int64_t first = 0; first < K_; first += kBlock) {
      const int64_t end = std::min(first + kBlock, K_), B = end - first;
      const auto here = [&](const at::Tensor& t) { return t.narrow(0, first, B); };
      const ColumnBlock columns{
          here(gradient_).clone(), here(C_).narrow(1, first, B), here(Q_), changes.narrow(0, 0, B), here(code_),
          here(inverse_diagonal_)};
      for (int64_t k = first; k < end;) {
        const int64_t g = k / group_, last = std::min(end, (g + 1) * group_);
        const ColumnRule rule{scale_.select(0, g), zero_.select(0, g), step_.select(0, g), grid_.bits,
                              keep_.defined() ? here(keep_) : at::Tensor()};
        fix_columns(columns, k - first, last - first, rule);
        k = last;
      }
      gradient_.addmm_(C_.narrow(1, first, B), columns.left, 1, -1);
    }
    return !code_.equal(before);
  }

  /// Least-squares scales, one group after the other; needs the gradient of a pass.
  void refit_scales() {
    for (int64_t g = 0; g < scale_.size(0); ++g) {
      const int64_t first = g * group_, length = std::min(group_, K_ - first);
      at::Tensor steps = code_.narrow(0, first, length) - zero_.select(0, g);
      if (keep_.defined()) steps.mul_(keep_.narrow(0, first, length));
      const at::Tensor columns = C_.narrow(1, first, length);  // [K, length]
      const at::Tensor slope = (gradient_.narrow(0, first, length) * steps).sum(0);
      const at::Tensor curvature = (columns.narrow(0, first, length).matmul(steps) * steps).sum(0);
      const at::Tensor scale = scale_.select(0, g);
      const at::Tensor flat = curvature <= 0;
      const at::Tensor wanted = scale + (slope / curvature.masked_fill(flat, 1)).masked_fill(flat, 0);
      at::Tensor stored = wanted.clamp(0, 65504).to(at::kHalf).to(at::kFloat);
      // Nearer to the parabola's lowest point is lower. A scale that becomes 0 could never come back.
      const at::Tensor better = ((stored - wanted).abs() < (scale - wanted).abs()).logical_and(stored > 0);
      stored = at::where(better, stored, scale);
      gradient_.addmm_(columns, steps * (stored - scale), 1, -1);
      scale.copy_(stored);
      Q_.narrow(0, first, length).copy_(steps * stored);
    }
    step_ = scale_.masked_fill(scale_ == 0, 1);
  }

  Rounded rounded() const { return {code_.t().contiguous(), {scale_.t().contiguous(), zero_.t().contiguous()}}; }

 private:
  Grid grid_;
  int64_t K_, group_;
  at::Tensor Wt_, C_;
  at::Tensor code_;                 // [K, N]
  at::Tensor scale_, step_, zero_;  // [groups, N]; step: 1 where the scale is 0
  at::Tensor keep_;                 // [K, N] bool, or undefined
  at::Tensor Q_, gradient_;         // [K, N]: what is stored, C (W - Q)
  at::Tensor inverse_diagonal_;     // [K]
};

}  // namespace

Rounded descend_codes(const at::Tensor& W, const at::Tensor& C, const Grid& grid, const Rounded& start,
                      const at::Tensor& keep, int passes, Scales scales) {
  Codes codes(W, C, grid, start, keep);
  for (int i = 0; i < passes && codes.pass(); ++i) {
    if (i + 1 < passes && scales == Scales::refitted) codes.refit_scales();
  }
  return codes.rounded();
}

}  // namespace lacuna::solver
