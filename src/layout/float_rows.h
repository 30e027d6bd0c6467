// src/layout/float_rows.h - f32, f16, bf16: one float a weight, little-endian, no blocks, any K.
//   f32   4 bytes  IEEE 754 binary32, stored as it is
//   f16   2 bytes  IEEE 754 binary16
//   bf16  2 bytes  upper half of a binary32
// Encoding rounds to nearest even, takes what is too large to the largest finite number (f16: 65504) and not to
// infinity, and ignores importance; decoding is exact. Rows may start at any address (a safetensors file aligns
// nothing).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lacuna::layout {

void encode_f32(std::span<const float> w, std::span<std::byte> out);
void encode_f16(std::span<const float> w, std::span<std::byte> out);
void encode_bf16(std::span<const float> w, std::span<std::byte> out);

void decode_f32(std::span<const std::byte> row, std::span<float> w);
void decode_f16(std::span<const std::byte> row, std::span<float> w);
void decode_bf16(std::span<const std::byte> row, std::span<float> w);

/// No value of the row is NaN or infinite.
bool is_finite_f32(std::span<const std::byte> row);
bool is_finite_f16(std::span<const std::byte> row);
bool is_finite_bf16(std::span<const std::byte> row);

}  // namespace lacuna::layout
