#include "kernels/cuda/gemm_rows.cu"
