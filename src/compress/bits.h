// src/compress/bits.h - small whole numbers several to a byte, for what stays on a device.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace lacuna::compress {

/// values: [n, width] uint8 below 2^bits, bits 1, 2, 4 or 8 -> [n, ceil(width bits / 8)] uint8, the first in the low
/// bits.
at::Tensor pack_bits(const at::Tensor& values, int bits);
/// The inverse: [n, width] uint8.
at::Tensor unpack_bits(const at::Tensor& packed, int bits, int64_t width);

}  // namespace lacuna::compress
