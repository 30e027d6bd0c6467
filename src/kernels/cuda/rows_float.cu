#include "kernels/cuda/rows.cuh"

namespace lacuna::cuda {

const RowsKernel* float_rows_kernel(layout::Id id) {
  switch (id) {
    case layout::Id::f32:
      return &kRowsKernel<FragF32>;
    case layout::Id::f16:
      return &kRowsKernel<FragF16>;
    case layout::Id::bf16:
      return &kRowsKernel<FragBf16>;
    default:
      return nullptr;
  }
}

}  // namespace lacuna::cuda
