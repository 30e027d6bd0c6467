// src/compress/device.h - the devices that LibTorch computes on.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace lacuna::compress {

/// CUDA device number `index`, checked with a first allocation. Throws Error saying what is missing: a LibTorch made
/// for CUDA, a driver, that device.
at::Device cuda_device(int index);

/// The most memory of a device that LibTorch has had in use at once since this was made; one at a time.
class DeviceMemory {
 public:
  explicit DeviceMemory(at::Device device);
  /// Bytes. 0: the CPU, or a LibTorch that does not tell (before 2.9).
  int64_t peak() const;

 private:
  at::Device device_;
};

}  // namespace lacuna::compress
