#include "kernels/cuda/groups_2.cu"
