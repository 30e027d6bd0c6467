#include "kernels/cuda/tensor_core.cc"
