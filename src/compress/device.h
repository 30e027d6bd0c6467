// src/compress/device.h - the devices that LibTorch computes on.
#pragma once

#include <ATen/ATen.h>

namespace lacuna::compress {

/// CUDA device number `index`, checked with a first allocation. Throws Error saying what is missing: a LibTorch made
/// for CUDA, a driver, that device.
at::Device cuda_device(int index);

}  // namespace lacuna::compress
