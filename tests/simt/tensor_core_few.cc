#include "kernels/cuda/tensor_core_few.cu"
