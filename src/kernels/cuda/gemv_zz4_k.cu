// src/kernels/cuda/gemv_zz4_k.cu - the instances for zz4_k.
#include "kernels/cuda/frag_zz4_k.cuh"
#include "kernels/cuda/gemv.cuh"

namespace lacuna::cuda {

GemvTable gemv_zz4_k() {
  static const GemvKernel kKernels[] = {
      gemv_kernel<FragZz4K, 8, 32, 24>(), gemv_kernel<FragZz4K, 4, 32, 24>(), gemv_kernel<FragZz4K, 8, 16, 32>(),
      gemv_kernel<FragZz4K, 4, 16, 32>(), gemv_kernel<FragZz4K, 8, 8, 32>(),
  };
  return {layout::Id::zz4_k, kKernels};
}

}  // namespace lacuna::cuda
