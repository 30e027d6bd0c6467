#include "kernels/cuda/calibration.cu"
