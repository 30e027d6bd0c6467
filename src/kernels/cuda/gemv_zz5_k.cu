// src/kernels/cuda/gemv_zz5_k.cu - the instances for zz5_k.
#include "kernels/cuda/frag_zz5_k.cuh"
#include "kernels/cuda/gemv.cuh"

namespace lacuna::cuda {

GemvTable gemv_zz5_k() {
  static const GemvKernel kKernels[] = {
      gemv_kernel<FragZz5K, 8, 16, 24>(), gemv_kernel<FragZz5K, 4, 16, 24>(), gemv_kernel<FragZz5K, 4, 16, 20>(),
      gemv_kernel<FragZz5K, 8, 8, 32>(),  gemv_kernel<FragZz5K, 8, 32, 16>(),
  };
  return {layout::Id::zz5_k, kKernels};
}

}  // namespace lacuna::cuda
