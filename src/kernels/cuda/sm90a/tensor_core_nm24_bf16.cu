// src/kernels/cuda/sm90a/tensor_core_nm24_bf16.cu - the wgmma kernel for 2:4 bf16.
#include <array>

#include "kernels/cuda/sm90a/tensor_core_wgmma.cuh"

namespace lacuna::cuda {

std::span<const WgmmaRow> wgmma_rows_nm24_bf16() {
  static constexpr std::array kRows = {row<false, true, false, 256, 2>(), row<false, true, false, 192, 2>(),
                                       row<false, true, false, 128, 2>(), row<false, true, false, 64, 1>()};
  return kRows;
}

}  // namespace lacuna::cuda
