#include "kernels/cuda/groups_16.cu"
