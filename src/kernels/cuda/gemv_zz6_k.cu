// src/kernels/cuda/gemv_zz6_k.cu - the instances for zz6_k.
#include "kernels/cuda/frag_zz6_k.cuh"
#include "kernels/cuda/gemv.cuh"

namespace lacuna::cuda {

GemvTable gemv_zz6_k() {
  static const GemvKernel kKernels[] = {
      gemv_kernel<FragZz6K, 8, 16, 24>(), gemv_kernel<FragZz6K, 4, 16, 24>(), gemv_kernel<FragZz6K, 4, 16, 20>(),
      gemv_kernel<FragZz6K, 8, 8, 32>(),  gemv_kernel<FragZz6K, 8, 32, 16>(),
  };
  return {layout::Id::zz6_k, kKernels};
}

}  // namespace lacuna::cuda
