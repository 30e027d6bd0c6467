#include "kernels/cuda/joint_attention.cu"
