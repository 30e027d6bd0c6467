#include "kernels/cuda/rows.cuh"

namespace lacuna::cuda {

const RowsKernel* grouped_rows_kernel(layout::Id id) {
  switch (id) {
    case layout::Id::gq2:
      return &kRowsKernel<GroupedFrag<2>>;
    case layout::Id::gq3:
      return &kRowsKernel<GroupedFrag<3>>;
    case layout::Id::gq4:
    case layout::Id::nm24_q4:
      return &kRowsKernel<GroupedFrag<4>>;
    case layout::Id::gq8:
      return &kRowsKernel<GroupedFrag8>;
    default:
      return nullptr;
  }
}

}  // namespace lacuna::cuda
