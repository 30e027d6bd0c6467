#include "kernels/cuda/tensor_core_separate.cu"
