#include "kernels/cuda/image_ops.cu"
