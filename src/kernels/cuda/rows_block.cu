#include "kernels/cuda/rows.cuh"

namespace lacuna::cuda {

const RowsKernel* block_rows_kernel(layout::Id id) {
  switch (id) {
    case layout::Id::q4_0:
      return &kRowsKernel<FragQ4_0>;
    case layout::Id::q4_1:
      return &kRowsKernel<FragQ4_1>;
    case layout::Id::q5_0:
      return &kRowsKernel<FragQ5_0>;
    case layout::Id::q5_1:
      return &kRowsKernel<FragQ5_1>;
    case layout::Id::q8_0:
      return &kRowsKernel<FragQ8_0>;
    default:
      return nullptr;
  }
}

}  // namespace lacuna::cuda
