#include "layout/bm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/scalar.h"
#include "layout/grouped.h"
#include "layout/octet.h"
#include "layout/uneven_rows.h"

namespace lacuna::layout {

namespace {

int64_t count_kept(const std::byte* mask, int64_t mask_row) {
  int64_t kept = 0, b = 0;
  for (; b + 8 <= mask_row; b += 8) {
    uint64_t word;
    std::memcpy(&word, mask + b, sizeof(word));
    kept += std::popcount(word);
  }
  for (; b < mask_row; ++b) kept += std::popcount(uint8_t(mask[b]));
  return kept;
}

bool is_kept(const std::byte* mask, int64_t k) { return (uint8_t(mask[k / 8]) >> (k % 8) & 1) != 0; }

}  // namespace

BitmaskMap::BitmaskMap(const Layout& layout, Shape shape, Params params) : bits(layout.bits) {
  const auto [N, K] = shape;
  mask_row = K / 8 + (K % 8 != 0 ? 1 : 0);
  groups = bits < 16 ? group_count(K, params.group_size) : 0;
  bool fits = true;
  const auto section = [&](int64_t at, int64_t count, int64_t size) {  // of `count` items of `size` bytes; its end
    const auto bytes = checked_mul(count, size);
    const auto last = bytes ? checked_add(at, *bytes) : bytes;
    const auto padded = last ? checked_add(*last, kSection - 1) : last;
    fits = fits && padded;
    return fits ? *padded / kSection * kSection : 0;
  };
  const auto half_row = checked_mul(2, groups);
  fits = half_row && checked_mul(N, K) && N < INT64_MAX;
  scale = fits ? section(0, N + 1, 4) : 0;
  zero = fits ? section(scale, N, *half_row) : 0;
  mask = fits ? section(zero, N, *half_row) : 0;
  code = fits ? section(mask, N, mask_row) : 0;
  if (fits) section(code, params.octets, bits);
  if (!fits) throw Error("[{}, {}] in {} is more than 2^63 bytes; the file is damaged", N, K, layout.name);
  end = code + params.octets * bits;
  if (params.octets > N * mask_row)
    throw Error("octets is {}, but [{}, {}] has at most {}; the file is damaged", params.octets, N, K, N * mask_row);
  const int64_t most = params.octets * kOctet;
  if (params.nnz > most || params.nnz > N * K || params.nnz < most - N * (kOctet - 1))
    throw Error("{} octets hold {} to {} kept weights of [{}, {}], but nnz is {}; the file is damaged", params.octets,
                std::max(int64_t{0}, most - N * (kOctet - 1)), std::min(most, N * K), N, K, params.nnz);
}

BitmaskRow bitmask_row(const BitmaskMap& map, Shape shape, Params params, std::span<const std::byte> bytes, int64_t n) {
  const int64_t first = row_start(bytes, n), last = row_start(bytes, n + 1);
  const std::byte* mask = bytes.data() + map.mask + n * map.mask_row;
  const int64_t kept = count_kept(mask, map.mask_row);
  if (first > last || last > params.octets || last - first != (kept + kOctet - 1) / kOctet ||
      (shape.K % 8 != 0 && uint8_t(mask[map.mask_row - 1]) >> (shape.K % 8) != 0))
    throw Error("row {} keeps {} weights of {}, but its codes are octets {} to {} of {}; the file is damaged", n, kept,
                shape.K, first, last, params.octets);
  return {mask, bytes.data() + map.code + first * map.bits, kept, last - first};
}

int64_t bitmask_size(const Layout& layout, Shape shape, Params params) { return BitmaskMap(layout, shape, params).end; }

void decode_bitmask(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, int64_t row0,
                    int64_t rows, float* out) {
  const BitmaskMap map(layout, shape, params);
  const int64_t g = whole_group(shape.K, params.group_size);
  std::vector<float> weight(size_t(shape.K) + kOctet);  // codes or values of the kept ones
  for (int64_t n = row0; n < row0 + rows; ++n, out += shape.K) {
    const BitmaskRow row = bitmask_row(map, shape, params, bytes, n);
    for (int64_t o = 0; o < row.octets; ++o) {
      uint8_t code[kOctet];
      if (map.bits < 16) read_octet(map.bits, row.code + o * map.bits, kOctet, code);
      for (int64_t i = 0; i < kOctet; ++i)
        weight[size_t(o * kOctet + i)] = map.bits < 16 ? float(code[i]) : half_at(row.code + 2 * (o * kOctet + i));
    }
    const std::byte* scale = bytes.data() + map.scale + 2 * n * map.groups;
    const std::byte* zero = bytes.data() + map.zero + 2 * n * map.groups;
    for (int64_t k = 0, i = 0; k < shape.K; ++k) {
      if (!is_kept(row.mask, k))
        out[k] = 0.0f;
      else if (map.bits == 16)
        out[k] = weight[size_t(i++)];
      else
        out[k] = half_at(scale + 2 * (k / g)) * (weight[size_t(i++)] - half_at(zero + 2 * (k / g)));
    }
  }
}

int64_t first_bad_bitmask_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  const BitmaskMap map(layout, shape, params);
  const auto part = [&](int64_t begin, int64_t end) { return bytes.subspan(size_t(begin), size_t(end - begin)); };
  const auto [N, K] = shape;
  int64_t octets = 0, kept = 0;
  for (int64_t n = 0; n < N; ++n) {
    if (row_start(bytes, n) != octets) return n;
    const int64_t halves = 2 * map.groups;
    if (!finite_halves(part(map.scale + n * halves, map.scale + (n + 1) * halves)) ||
        !finite_halves(part(map.zero + n * halves, map.zero + (n + 1) * halves)))
      return n;
    try {
      const BitmaskRow row = bitmask_row(map, shape, params, bytes, n);
      octets += row.octets;
      kept += row.kept;
      const int64_t tail = row.kept % kOctet;
      const std::byte* last = row.code + (row.octets - 1) * map.bits;
      uint8_t code[kOctet];
      if (map.bits == 16) {
        if (!finite_halves({row.code, size_t(2 * row.kept)})) return n;
        if (tail != 0 && !all_zero({last + 2 * tail, size_t(2 * (kOctet - tail))})) return n;
      } else if (tail != 0) {
        read_octet(map.bits, last, kOctet, code);
        if (std::any_of(code + tail, code + kOctet, [](uint8_t c) { return c != 0; })) return n;
      }
    } catch (const Error&) {
      return n;
    }
  }
  const int64_t halves = 2 * N * map.groups;
  const bool sound = octets == params.octets && kept == params.nnz && row_start(bytes, N) == octets &&
                     all_zero(part(4 * (N + 1), map.scale)) && all_zero(part(map.scale + halves, map.zero)) &&
                     all_zero(part(map.zero + halves, map.mask)) &&
                     all_zero(part(map.mask + N * map.mask_row, map.code));
  return sound || N == 0 ? -1 : N - 1;
}

}  // namespace lacuna::layout
