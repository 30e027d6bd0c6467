// src/kernels/cuda/sm90a/tensor_core_f8_full.cu - the wgmma kernel for e4m3, sums in float32.
#include <array>

#include "kernels/cuda/sm90a/tensor_core_wgmma.cuh"

namespace lacuna::cuda {

std::span<const WgmmaRow> wgmma_rows_f8_full() {
  static constexpr std::array kRows = {row<true, false, true, 128, 2>(), row<true, false, true, 64, 1>()};
  return kRows;
}

}  // namespace lacuna::cuda
