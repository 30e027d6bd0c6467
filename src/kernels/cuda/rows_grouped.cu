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
    case layout::Id::bm2:
      return &kRowsKernel<MaskedFrag<GroupedFrag<2>>>;
    case layout::Id::bm3:
      return &kRowsKernel<MaskedFrag<GroupedFrag<3>>>;
    case layout::Id::bm4:
      return &kRowsKernel<MaskedFrag<GroupedFrag<4>>>;
    case layout::Id::bm8:
      return &kRowsKernel<MaskedFrag<GroupedFrag8>>;
    case layout::Id::bm16:
      return &kRowsKernel<FragF16>;
    default:
      return nullptr;
  }
}

}  // namespace lacuna::cuda
