#include "kernels/cuda/groups_8.cu"
