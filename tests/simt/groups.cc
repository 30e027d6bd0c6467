#include "kernels/cuda/groups.cu"
