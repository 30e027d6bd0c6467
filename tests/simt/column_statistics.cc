#include "kernels/cuda/column_statistics.cu"
