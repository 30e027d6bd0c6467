// src/kernels/cuda/gemv_zz8.cu - the instances for zz8.
#include "kernels/cuda/frag_zz8.cuh"
#include "kernels/cuda/gemv.cuh"

namespace lacuna::cuda {

GemvTable gemv_zz8() {
  static const GemvKernel kKernels[] = {
      gemv_kernel<FragZz8, 8, 16, 24>(),
      gemv_kernel<FragZz8, 4, 16, 24>(),
      gemv_kernel<FragZz8, 8, 8, 32>(),
      gemv_kernel<FragZz8, 8, 16, 32>(),
  };
  return {layout::Id::zz8, kKernels};
}

}  // namespace lacuna::cuda
