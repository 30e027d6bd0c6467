#include "solver/coordinate_descent.h"

#include <algorithm>
#include <vector>

namespace lacuna::solver {
namespace {

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
        keep_(keep.defined() ? keep.t().to(at::kFloat).contiguous() : at::Tensor()),
        Q_(masked(decode(start, grid), keep).t().contiguous()) {
    const at::Tensor diagonal = C.diagonal().to(at::kCPU).contiguous();
    for (int64_t k = 0; k < K_; ++k) {  // dead inputs stay as they are
      const float c = diagonal.data_ptr<float>()[k];
      inverse_diagonal_.push_back(c > 0 ? 1 / c : 0);
    }
  }

  /// Whether a code changed.
  bool pass() {
    constexpr int64_t kBlock = 64;
    const at::Tensor before = code_.clone();
    gradient_ = C_.matmul(Wt_ - Q_);
    const int64_t N = Q_.size(1);
    at::Tensor target = at::empty({N}, Q_.options()), value = at::empty({N}, Q_.options());
    const at::Tensor changes = at::empty({kBlock, N}, Q_.options());
    for (int64_t first = 0; first < K_; first += kBlock) {
      const int64_t end = std::min(first + kBlock, K_);
      const at::Tensor here = gradient_.narrow(0, first, end - first).clone();  // up to date within the block
      const at::Tensor change = changes.narrow(0, 0, end - first);
      for (int64_t k = first; k < end; ++k) {
        at::Tensor q = Q_.select(0, k), code = code_.select(0, k), one = change.select(0, k - first);
        at::add_out(target, q, here.select(0, k - first), inverse_diagonal_[size_t(k)]);
        round_column(k, target, code, value);
        at::sub_out(one, value, q);
        q.copy_(value);
        if (k + 1 < end) {
          here.narrow(0, k + 1 - first, end - k - 1).addr_(C_.select(0, k).narrow(0, k + 1, end - k - 1), one, 1, -1);
        }
      }
      gradient_.addmm_(C_.narrow(1, first, end - first), change, 1, -1);
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
  /// The nearest code to target and its value, 0 where dropped.
  void round_column(int64_t k, const at::Tensor& target, at::Tensor& code, at::Tensor& value) const {
    const at::Tensor scale = scale_.select(0, k / group_), zero = zero_.select(0, k / group_);
    at::div_out(code, target, step_.select(0, k / group_));
    code.round_().add_(zero).clamp_(0, (1 << grid_.bits) - 1);
    at::sub_out(value, code, zero);
    value.mul_(scale);
    if (keep_.defined()) value.mul_(keep_.select(0, k));
  }

  Grid grid_;
  int64_t K_, group_;
  at::Tensor Wt_, C_;
  at::Tensor code_;                 // [K, N]
  at::Tensor scale_, step_, zero_;  // [groups, N]; step: 1 where the scale is 0
  at::Tensor keep_;                 // [K, N], 0 or 1, or undefined
  at::Tensor Q_, gradient_;         // [K, N]: what is stored, C (W - Q)
  std::vector<float> inverse_diagonal_;
};

}  // namespace

Rounded descend_codes(const at::Tensor& W, const at::Tensor& C, const Grid& grid, const Rounded& start,
                      const at::Tensor& keep, int passes) {
  Codes codes(W, C, grid, start, keep);
  for (int i = 0; i < passes && codes.pass(); ++i) {
    if (i + 1 < passes) codes.refit_scales();
  }
  return codes.rounded();
}

}  // namespace lacuna::solver
