// src/kernels/cuda/sm90a/tensor_core_bf16.cu - the wgmma kernel for bf16.
#include <array>

#include "kernels/cuda/sm90a/tensor_core_wgmma.cuh"

namespace lacuna::cuda {

std::span<const WgmmaRow> wgmma_rows_bf16() {
  static constexpr std::array kRows = {row<false, false, false, 256, 2>(), row<false, false, false, 192, 2>(),
                                       row<false, false, false, 128, 2>(), row<false, false, false, 64, 1>()};
  return kRows;
}

}  // namespace lacuna::cuda
