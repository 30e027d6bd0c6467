#include "layout/float_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/scalar.h"

namespace lacuna::layout {

namespace {

template <class Stored>
Stored load(std::span<const std::byte> row, size_t k) {
  Stored value;
  std::memcpy(&value, row.data() + k * sizeof(Stored), sizeof(Stored));
  return value;
}

template <class Stored>
void store(std::span<std::byte> out, size_t k, Stored value) {
  std::memcpy(out.data() + k * sizeof(Stored), &value, sizeof(Stored));
}

// A value is not finite when its exponent bits are all ones.
template <class Stored>
bool is_finite(std::span<const std::byte> row, Stored exponent) {
  bool finite = true;
  for (size_t k = 0; k < row.size() / sizeof(Stored); ++k) finite &= (load<Stored>(row, k) & exponent) != exponent;
  return finite;
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "rows are copied as they are stored");

void encode_f32(std::span<const float> w, std::span<std::byte> out) {
  std::memcpy(out.data(), w.data(), w.size_bytes());
}

void encode_f16(std::span<const float> w, std::span<std::byte> out) {
  constexpr float kLargest = 65504.0f;
  for (size_t k = 0; k < w.size(); ++k) store(out, k, to_f16(std::clamp(w[k], -kLargest, kLargest)));
}

void encode_bf16(std::span<const float> w, std::span<std::byte> out) {
  constexpr float kLargest = 0x1.fep127f;
  for (size_t k = 0; k < w.size(); ++k) store(out, k, to_bf16(std::clamp(w[k], -kLargest, kLargest)));
}

void decode_f32(std::span<const std::byte> row, std::span<float> w) {
  std::memcpy(w.data(), row.data(), w.size_bytes());
}

void decode_f16(std::span<const std::byte> row, std::span<float> w) {
  for (size_t k = 0; k < w.size(); ++k) w[k] = to_float(load<f16>(row, k));
}

void decode_bf16(std::span<const std::byte> row, std::span<float> w) {
  for (size_t k = 0; k < w.size(); ++k) w[k] = to_float(load<bf16>(row, k));
}

bool is_finite_f32(std::span<const std::byte> row) { return is_finite<uint32_t>(row, 0x7f800000u); }
bool is_finite_f16(std::span<const std::byte> row) { return is_finite<uint16_t>(row, 0x7c00u); }
bool is_finite_bf16(std::span<const std::byte> row) { return is_finite<uint16_t>(row, 0x7f80u); }

}  // namespace lacuna::layout
