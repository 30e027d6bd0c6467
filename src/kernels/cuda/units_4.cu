// src/kernels/cuda/units_4.cu - the instances for gs3 and gs4, whose codes take 4 bits.
#include "kernels/cuda/units.cuh"

namespace lacuna::cuda {

std::span<const UnitsKernel> units_kernels_4() {
  static const UnitsKernel kKernels[] = {
      units_kernel<4, false, false, 16, 32>(), units_kernel<4, false, false, 8, 32>(),
      units_kernel<4, false, false, 24, 24>(), units_kernel<4, false, false, 12, 24>(),
      units_kernel<4, false, true, 16, 32>(),  units_kernel<4, false, true, 8, 32>(),
      units_kernel<4, false, true, 24, 24>(),  units_kernel<4, false, true, 12, 24>(),
      units_kernel<4, true, false, 16, 32>(),  units_kernel<4, true, false, 8, 32>(),
      units_kernel<4, true, false, 24, 24>(),  units_kernel<4, true, false, 12, 24>(),
      units_kernel<4, true, true, 16, 32>(),   units_kernel<4, true, true, 8, 32>(),
      units_kernel<4, true, true, 24, 24>(),   units_kernel<4, true, true, 12, 24>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
