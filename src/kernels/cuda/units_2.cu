// src/kernels/cuda/units_2.cu - the instances for gs2.
#include "kernels/cuda/units.cuh"

namespace lacuna::cuda {

std::span<const UnitsKernel> units_kernels_2() {
  static const UnitsKernel kKernels[] = {
      units_kernel<2, false, false, 16, 32>(), units_kernel<2, false, false, 8, 32>(),
      units_kernel<2, false, false, 24, 24>(), units_kernel<2, false, false, 12, 24>(),
      units_kernel<2, false, true, 16, 32>(),  units_kernel<2, false, true, 8, 32>(),
      units_kernel<2, false, true, 24, 24>(),  units_kernel<2, false, true, 12, 24>(),
      units_kernel<2, true, false, 16, 32>(),  units_kernel<2, true, false, 8, 32>(),
      units_kernel<2, true, false, 24, 24>(),  units_kernel<2, true, false, 12, 24>(),
      units_kernel<2, true, true, 16, 32>(),   units_kernel<2, true, true, 8, 32>(),
      units_kernel<2, true, true, 24, 24>(),   units_kernel<2, true, true, 12, 24>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
