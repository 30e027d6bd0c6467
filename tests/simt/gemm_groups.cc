#include "kernels/cuda/gemm_groups.cu"
