// src/kernels/cuda/groups_8.cu - the instances for gs8.
#include "kernels/cuda/groups.cuh"

namespace lacuna::cuda {

std::span<const GroupsKernel> groups_kernels_8() {
  static const GroupsKernel kKernels[] = {
      groups_kernel<8, 8, Math::mma, 8, 16>(),   groups_kernel<8, 8, Math::mma, 16, 16>(),
      groups_kernel<8, 16, Math::mma, 8, 16>(),  groups_kernel<8, 16, Math::mma, 16, 16>(),
      groups_kernel<8, 32, Math::mma, 8, 16>(),  groups_kernel<8, 32, Math::mma, 16, 16>(),
      groups_kernel<8, 64, Math::mma, 8, 16>(),  groups_kernel<8, 64, Math::mma, 16, 16>(),
      groups_kernel<8, 128, Math::mma, 8, 16>(), groups_kernel<8, 128, Math::mma, 16, 16>(),
  };
  return kKernels;
}

}  // namespace lacuna::cuda
