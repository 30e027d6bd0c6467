#pragma GCC diagnostic ignored "-Wshadow"  // nvcc has no such warning
#include "kernels/cuda/ops_attention.cu"
