// src/kernels/cuda/groups_16.cu - the instances for gs16.
#include "kernels/cuda/groups.cuh"

namespace lacuna::cuda {

std::span<const GroupsKernel> groups_kernels_16() {
  static const GroupsKernel kKernels[] = {
      groups_kernel<16, 8, Math::mma, 8, 16>(),   groups_kernel<16, 8, Math::mma, 16, 16>(),
      groups_kernel<16, 16, Math::mma, 8, 16>(),  groups_kernel<16, 16, Math::mma, 16, 16>(),
      groups_kernel<16, 32, Math::mma, 8, 16>(),  groups_kernel<16, 32, Math::mma, 16, 16>(),
      groups_kernel<16, 64, Math::mma, 8, 16>(),  groups_kernel<16, 64, Math::mma, 16, 16>(),
      groups_kernel<16, 128, Math::mma, 8, 16>(), groups_kernel<16, 128, Math::mma, 16, 16>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
