#include "kernels/cuda/groups_4.cu"
