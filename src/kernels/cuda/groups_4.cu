// src/kernels/cuda/groups_4.cu - the instances for gs3 and gs4, whose codes take 4 bits.
#include "kernels/cuda/groups.cuh"

namespace lacuna::cuda {

std::span<const GroupsKernel> groups_kernels_4() {
  static const GroupsKernel kKernels[] = {
      groups_kernel<4, 8, Math::mma, 8, 24>(),   groups_kernel<4, 8, Math::mma, 24, 24>(),
      groups_kernel<4, 8, Math::mma, 8, 16>(),   groups_kernel<4, 8, Math::fma, 8, 16>(),
      groups_kernel<4, 16, Math::mma, 8, 24>(),  groups_kernel<4, 16, Math::mma, 24, 24>(),
      groups_kernel<4, 16, Math::mma, 8, 16>(),  groups_kernel<4, 16, Math::fma, 8, 16>(),
      groups_kernel<4, 32, Math::mma, 8, 24>(),  groups_kernel<4, 32, Math::mma, 24, 24>(),
      groups_kernel<4, 32, Math::mma, 8, 16>(),  groups_kernel<4, 32, Math::fma, 8, 16>(),
      groups_kernel<4, 64, Math::mma, 8, 24>(),  groups_kernel<4, 64, Math::mma, 24, 24>(),
      groups_kernel<4, 64, Math::mma, 8, 16>(),  groups_kernel<4, 64, Math::fma, 8, 16>(),
      groups_kernel<4, 128, Math::mma, 8, 24>(), groups_kernel<4, 128, Math::mma, 24, 24>(),
      groups_kernel<4, 128, Math::mma, 8, 16>(), groups_kernel<4, 128, Math::fma, 8, 16>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
