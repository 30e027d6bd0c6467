// src/kernels/cuda/gemv_zz3_k.cu - the instances for zz3_k.
#include "kernels/cuda/frag_zz3_k.cuh"
#include "kernels/cuda/gemv.cuh"

namespace lacuna::cuda {

GemvTable gemv_zz3_k() {
  static const GemvKernel kKernels[] = {
      gemv_kernel<FragZz3K, 8, 16, 24>(), gemv_kernel<FragZz3K, 4, 16, 24>(), gemv_kernel<FragZz3K, 4, 16, 20>(),
      gemv_kernel<FragZz3K, 8, 8, 32>(),  gemv_kernel<FragZz3K, 8, 32, 16>(),
  };
  return {layout::Id::zz3_k, kKernels};
}

}  // namespace lacuna::cuda
