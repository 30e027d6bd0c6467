#include "kernels/cuda/units_4.cu"
