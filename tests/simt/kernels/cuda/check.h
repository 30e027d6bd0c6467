// tests/simt/kernels/cuda/check.h - stands in for src/kernels/cuda/check.h, which launch.cuh has here.
#pragma once

#include "kernels/cuda/launch.cuh"
