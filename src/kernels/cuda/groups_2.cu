// src/kernels/cuda/groups_2.cu - the instances for gs2.
#include "kernels/cuda/groups.cuh"

namespace lacuna::cuda {

std::span<const GroupsKernel> groups_kernels_2() {
  static const GroupsKernel kKernels[] = {
      groups_kernel<2, 8, Math::mma, 8, 24>(),   groups_kernel<2, 8, Math::mma, 24, 24>(),
      groups_kernel<2, 8, Math::mma, 8, 16>(),   groups_kernel<2, 16, Math::mma, 8, 24>(),
      groups_kernel<2, 16, Math::mma, 24, 24>(), groups_kernel<2, 16, Math::mma, 8, 16>(),
      groups_kernel<2, 32, Math::mma, 8, 24>(),  groups_kernel<2, 32, Math::mma, 24, 24>(),
      groups_kernel<2, 32, Math::mma, 8, 16>(),  groups_kernel<2, 64, Math::mma, 8, 24>(),
      groups_kernel<2, 64, Math::mma, 24, 24>(), groups_kernel<2, 64, Math::mma, 8, 16>(),
      groups_kernel<2, 128, Math::mma, 8, 24>(), groups_kernel<2, 128, Math::mma, 24, 24>(),
      groups_kernel<2, 128, Math::mma, 8, 16>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
