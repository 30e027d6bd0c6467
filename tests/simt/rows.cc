#include "kernels/cuda/rows.cu"

#include "kernels/cuda/gemm.h"

namespace lacuna::cuda {

// The other layouts' kernels, and what gemm.cu has beside kernels.
const RowsKernel* float_rows_kernel(layout::Id) { return nullptr; }
const RowsKernel* block_rows_kernel(layout::Id) { return nullptr; }
const RowsKernel* superblock_rows_kernel(layout::Id) { return nullptr; }
int64_t operand_bytes(int64_t rows, int64_t K) {
  return (rows + kOperandRows - 1) / kOperandRows * ((K + kOperandColumns - 1) / kOperandColumns) * kOperandRows *
         kOperandColumns * 2;
}

}  // namespace lacuna::cuda
