// src/kernels/cuda/gemv_zz2_k.cu - the instances for zz2_k.
#include "kernels/cuda/frag_zz2_k.cuh"
#include "kernels/cuda/gemv.cuh"

namespace lacuna::cuda {

GemvTable gemv_zz2_k() {
  static const GemvKernel kKernels[] = {
      gemv_kernel<FragZz2K, 8, 32, 24>(),
      gemv_kernel<FragZz2K, 4, 32, 24>(),
      gemv_kernel<FragZz2K, 8, 16, 32>(),
      gemv_kernel<FragZz2K, 8, 16, 24>(),
  };
  return {layout::Id::zz2_k, kKernels};
}

}  // namespace lacuna::cuda
