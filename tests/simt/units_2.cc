#include "kernels/cuda/units_2.cu"
