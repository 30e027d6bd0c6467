#include "kernels/cuda/rows_grouped.cu"
