#include "kernels/cuda/tensor_core_mma.cu"
