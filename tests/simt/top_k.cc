#include "kernels/cuda/top_k.cu"
