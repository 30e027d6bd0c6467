#include "kernels/cuda/beams.cu"
