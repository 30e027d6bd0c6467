#include "kernels/cuda/quantize_tokens.cu"
