// src/kernels/cuda/sm90a/tensor_core_f8.cu - the wgmma kernel for e4m3, sums in the tensor core.
#include <array>

#include "kernels/cuda/sm90a/tensor_core_wgmma.cuh"

namespace lacuna::cuda {

std::span<const WgmmaRow> wgmma_rows_f8() {
  static constexpr std::array kRows = {row<true, false, false, 256, 2>(), row<true, false, false, 192, 2>(),
                                       row<true, false, false, 128, 2>(), row<true, false, false, 64, 1>()};
  return kRows;
}

}  // namespace lacuna::cuda
