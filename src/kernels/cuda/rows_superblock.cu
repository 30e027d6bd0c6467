#include "kernels/cuda/rows.cuh"

namespace lacuna::cuda {

const RowsKernel* superblock_rows_kernel(layout::Id id) {
  switch (id) {
    case layout::Id::q2_K:
      return &kRowsKernel<FragQ2K>;
    case layout::Id::q3_K:
      return &kRowsKernel<FragQ3K>;
    case layout::Id::q4_K:
      return &kRowsKernel<FragQ4K>;
    case layout::Id::q5_K:
      return &kRowsKernel<FragQ5K>;
    case layout::Id::q6_K:
      return &kRowsKernel<FragQ6K>;
    default:
      return nullptr;
  }
}

}  // namespace lacuna::cuda
