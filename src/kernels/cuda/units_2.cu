// src/kernels/cuda/units_2.cu - the instances for gs2.
#include "kernels/cuda/units.cuh"

namespace lacuna::cuda {

std::span<const UnitsKernel> units_kernels_2() {
  static const UnitsKernel kKernels[] = {
      units_kernel<2, false, 16, 32>(), units_kernel<2, false, 8, 32>(), units_kernel<2, false, 24, 24>(),
      units_kernel<2, false, 12, 24>(), units_kernel<2, true, 16, 32>(), units_kernel<2, true, 8, 32>(),
      units_kernel<2, true, 24, 24>(),  units_kernel<2, true, 12, 24>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
