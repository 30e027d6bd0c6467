#include "layout/gq.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/scalar.h"
#include "layout/grouped.h"
#include "layout/octet.h"

namespace lacuna::layout {

int64_t gq_row_bytes(int bits, int64_t K, int64_t group_size) {
  const auto codes = checked_add(K / kOctet * bits, 16);  // K B / 8 and what rounding up may add
  const auto scales = checked_mul(4, group_count(K, group_size));
  const auto most = codes && scales ? checked_add(*codes, *scales) : std::nullopt;
  return K > INT64_MAX / 8 || !most ? -1 : *scales + (code_bytes(bits, K) + 1) / 2 * 2;
}

void encode_gq_row(int bits, std::span<const uint8_t> code, std::span<const float> scale, std::span<const float> zero,
                   std::span<std::byte> out) {
  const auto K = int64_t(code.size());
  assert(scale.size() == zero.size());
  std::byte* at = out.data();
  for (const std::span<const float> values : {scale, zero}) {
    for (const float value : values) {
      const f16 half = to_f16(value);
      std::memcpy(at, &half, sizeof(half));
      at += sizeof(half);
    }
  }
  for (int64_t k = 0; k < K; k += kOctet, at += bits) write_octet(bits, &code[size_t(k)], std::min(kOctet, K - k), at);
  std::byte* end = out.data() + 4 * scale.size() + size_t(code_bytes(bits, K));
  std::fill(end, out.data() + out.size(), std::byte{0});
}

void read_gq_row(int bits, std::span<const std::byte> row, std::span<uint8_t> code, std::span<float> scale,
                 std::span<float> zero) {
  const auto K = int64_t(code.size());
  const std::byte* at = row.data();
  for (const std::span<float> values : {scale, zero}) {
    for (float& value : values) {
      f16 half;
      std::memcpy(&half, at, sizeof(half));
      value = to_float(half);
      at += sizeof(half);
    }
  }
  for (int64_t k = 0; k < K; k += kOctet, at += bits) read_octet(bits, at, std::min(kOctet, K - k), &code[size_t(k)]);
}

int64_t gq_size(const Layout& layout, Shape shape, Params params) {
  const int64_t row = gq_row_bytes(layout.bits, shape.K, params.group_size);
  const auto size = row < 0 ? std::nullopt : checked_mul(row, shape.N);
  if (!size) throw Error("[{}, {}] in {} is more than 2^63 bytes; the file is damaged", shape.N, shape.K, layout.name);
  return *size;
}

void decode_gq(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, int64_t row0,
               int64_t rows, float* out) {
  const auto stride = size_t(gq_row_bytes(layout.bits, shape.K, params.group_size));
  const int64_t g = whole_group(shape.K, params.group_size);
  const auto groups = size_t(group_count(shape.K, params.group_size));
  std::vector<uint8_t> code(size_t(shape.K));
  std::vector<float> scale(groups), zero(groups);
  for (int64_t n = row0; n < row0 + rows; ++n) {
    read_gq_row(layout.bits, bytes.subspan(size_t(n) * stride, stride), code, scale, zero);
    for (size_t i = 0; i < groups; ++i) {
      const int64_t end = std::min(shape.K, int64_t(i + 1) * g);
      for (int64_t k = int64_t(i) * g; k < end; ++k) *out++ = scale[i] * (float(code[size_t(k)]) - zero[i]);
    }
  }
}

int64_t first_bad_gq_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  const auto stride = size_t(gq_row_bytes(layout.bits, shape.K, params.group_size));
  const auto numbers = size_t(2 * group_count(shape.K, params.group_size));
  const int64_t tail = shape.K % kOctet;
  for (int64_t n = 0; n < shape.N; ++n) {
    const std::span<const std::byte> row = bytes.subspan(size_t(n) * stride, stride);
    if (!finite_halves(row.first(2 * numbers))) return n;
    const size_t used = 2 * numbers + size_t(code_bytes(layout.bits, shape.K));
    if (used < stride && row[used] != std::byte{0}) return n;
    uint8_t code[kOctet];
    if (tail != 0 && !read_octet(layout.bits, &row[used - size_t(code_bytes(layout.bits, tail))], tail, code)) return n;
  }
  return -1;
}

}  // namespace lacuna::layout
