#include "layout/grouped.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"
#include "layout/bm.h"
#include "layout/gq.h"
#include "layout/gs.h"
#include "layout/nm24_q4.h"
#include "layout/octet.h"
#include "layout/row_work.h"

namespace lacuna::layout {

namespace {

template <class T>
std::span<const T> row_of(std::span<const T> matrix, int64_t n, int64_t cols) {
  return matrix.empty() ? matrix : matrix.subspan(size_t(n * cols), size_t(cols));
}

void check_spans(const Layout& layout, Shape shape, int64_t groups, const GroupedCodes& codes) {
  const auto weights = size_t(shape.N * shape.K), numbers = size_t(shape.N * groups);
  if (codes.code.size() != weights || codes.scale.size() != numbers || codes.zero.size() != numbers ||
      (!codes.keep.empty() && codes.keep.size() != weights))
    throw Error(
        "{} [{}, {}] with {} groups a row needs {} codes and {} scales and zeros, got {} codes, {} scales, {} zeros "
        "and "
        "a mask of {}",
        layout.name, shape.N, shape.K, groups, weights, numbers, codes.code.size(), codes.scale.size(),
        codes.zero.size(), codes.keep.size());
}

void check_halves(std::span<const float> values, const char* what) {
  for (size_t g = 0; g < values.size(); ++g)
    if (!holds_exactly(values[g]))
      throw Error("the {} of group {} is {}, which f16 does not hold exactly; round it before the codes are chosen",
                  what, g, values[g]);
}

void check_codes(int bits, std::span<const uint8_t> code, std::span<const uint8_t> keep) {
  const int top = (1 << bits) - 1;
  for (size_t k = 0; k < code.size(); ++k)
    if (code[k] > top && (keep.empty() || keep[k] != 0))
      throw Error("the code of input {} is {}, but {} bits hold 0 to {}", k, code[k], bits, top);
}

/// Codes of a gq row: a dropped weight gets its group's zero.
void fill_dropped(int bits, int64_t g, std::span<const float> zero, std::span<const uint8_t> keep,
                  std::span<uint8_t> code) {
  for (size_t k = 0, group = 0, next = size_t(g); k < code.size(); ++k) {
    if (k == next) ++group, next += size_t(g);
    if (keep[k] != 0) continue;
    const float z = zero[group];
    if (!(z >= 0 && z <= float((1 << bits) - 1) && z == std::floor(z)))
      throw Error("input {} is dropped, but its group's zero {} is none of the codes 0 to {}; store it in a bm layout",
                  k, z, (1 << bits) - 1);
    code[k] = uint8_t(z);
  }
}

void pack_gq(const Layout& layout, Shape shape, Params params, const GroupedCodes& codes, std::span<std::byte> out,
             ThreadPool* pool) {
  const int64_t groups = group_count(shape.K, params.group_size);
  const auto stride = size_t(gq_row_bytes(layout.bits, shape.K, params.group_size));
  each_row(shape.N, pool, [&](int64_t n) {
    const auto scale = row_of(codes.scale, n, groups), zero = row_of(codes.zero, n, groups);
    const auto keep = row_of(codes.keep, n, shape.K);
    const auto given = row_of(codes.code, n, shape.K);
    check_halves(scale, "scale");
    check_halves(zero, "zero");
    check_codes(layout.bits, given, keep);
    const auto row = out.subspan(size_t(n) * stride, stride);
    if (keep.empty()) return encode_gq_row(layout.bits, given, scale, zero, row);
    std::vector<uint8_t> code(given.begin(), given.end());
    fill_dropped(layout.bits, whole_group(shape.K, params.group_size), zero, keep, code);
    encode_gq_row(layout.bits, code, scale, zero, row);
  });
}

void pack_nm24(Shape shape, const GroupedCodes& codes, std::span<std::byte> out, ThreadPool* pool) {
  const int64_t blocks = shape.K / Nm24Q4Block::kCols;
  if (codes.keep.empty()) throw Error("nm24_q4 keeps 2 of every 4 weights, but there is no mask");
  each_row(shape.N, pool, [&](int64_t n) {
    const auto scale = row_of(codes.scale, n, blocks);
    check_halves(scale, "scale");
    for (const float zero : row_of(codes.zero, n, blocks))
      if (zero != 8) throw Error("a zero is {}, but nm24_q4 has only 8", zero);
    check_codes(4, row_of(codes.code, n, shape.K), row_of(codes.keep, n, shape.K));
    std::vector<Nm24Q4Block> row(static_cast<size_t>(blocks));
    pack_row(row_of(codes.code, n, shape.K), scale, row_of(codes.keep, n, shape.K), row);
    const auto bytes = std::as_bytes(std::span(row));
    std::memcpy(out.data() + size_t(n) * bytes.size(), bytes.data(), bytes.size());
  });
}

/// Writes row_start and masks; `row` writes what else belongs to a row, its octets at the place given.
template <class Row>
void pack_bitmask(const Layout& layout, Shape shape, Params params, std::span<const uint8_t> keep,
                  std::span<std::byte> out, ThreadPool* pool, const Row& row) {
  const BitmaskMap map(layout, shape, params);
  std::vector<uint32_t> start(size_t(shape.N) + 1);
  for (int64_t n = 0; n < shape.N; ++n) {
    int64_t kept = shape.K;
    if (!keep.empty()) {
      const auto mask = row_of(keep, n, shape.K);
      kept = shape.K - std::count(mask.begin(), mask.end(), uint8_t{0});
    }
    start[size_t(n) + 1] = start[size_t(n)] + uint32_t((kept + kOctet - 1) / kOctet);
  }
  std::memcpy(out.data(), start.data(), start.size() * sizeof(start[0]));
  each_row(shape.N, pool, [&](int64_t n) {
    std::byte* mask = out.data() + map.mask + n * map.mask_row;
    for (int64_t k = 0; k < shape.K; ++k)
      if (keep.empty() || keep[size_t(n * shape.K + k)] != 0) mask[k / 8] |= std::byte(1 << (k % 8));
    row(map, n, out.data() + map.code + int64_t(start[size_t(n)]) * map.bits);
  });
}

void pack_bitmask_codes(const Layout& layout, Shape shape, Params params, const GroupedCodes& codes,
                        std::span<std::byte> out, ThreadPool* pool) {
  pack_bitmask(layout, shape, params, codes.keep, out, pool, [&](const BitmaskMap& map, int64_t n, std::byte* at) {
    const auto scale = row_of(codes.scale, n, map.groups), zero = row_of(codes.zero, n, map.groups);
    const auto code = row_of(codes.code, n, shape.K), keep = row_of(codes.keep, n, shape.K);
    check_halves(scale, "scale");
    check_halves(zero, "zero");
    check_codes(map.bits, code, keep);
    for (const auto& [values, section] : {std::pair{scale, map.scale}, std::pair{zero, map.zero}}) {
      for (size_t g = 0; g < values.size(); ++g) {
        const f16 half = to_f16(values[g]);
        std::memcpy(out.data() + section + 2 * (n * map.groups + int64_t(g)), &half, sizeof(half));
      }
    }
    uint8_t octet[kOctet];
    int64_t count = 0;
    for (size_t k = 0; k < code.size(); ++k) {
      if (!keep.empty() && keep[k] == 0) continue;
      octet[count++] = code[k];
      if (count < kOctet) continue;
      write_octet(map.bits, octet, kOctet, at);
      at += map.bits;
      count = 0;
    }
    std::fill(octet + count, octet + kOctet, uint8_t{0});
    if (count > 0) write_octet(map.bits, octet, kOctet, at);
  });
}

void permute_bitmask_rows(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                          std::span<const int64_t> order, std::span<std::byte> out) {
  const BitmaskMap map(layout, shape, params);
  std::ranges::fill(out, std::byte{0});
  uint32_t start = 0;
  for (int64_t n = 0; n < shape.N; ++n) {
    const int64_t from = order[size_t(n)];
    const BitmaskRow row = bitmask_row(map, shape, params, bytes, from);
    std::memcpy(out.data() + 4 * n, &start, sizeof(start));
    for (const auto& [section, size] :
         {std::pair{map.scale, 2 * map.groups}, {map.zero, 2 * map.groups}, {map.mask, map.mask_row}})
      std::memcpy(out.data() + section + n * size, bytes.data() + section + from * size, size_t(size));
    std::memcpy(out.data() + map.code + int64_t{start} * map.bits, row.code, size_t(row.octets * map.bits));
    start += uint32_t(row.octets);
  }
  std::memcpy(out.data() + 4 * shape.N, &start, sizeof(start));
}

void begin(const Layout& layout, Shape shape, Params params, std::vector<std::byte>& out) {
  const int64_t bytes = layout.size_bytes(shape, params);
  out.clear();  // what is not written stays zero
  out.resize(size_t(bytes));
}

}  // namespace

Params complete_params(const Layout& layout, Shape shape, Params params, std::span<const uint8_t> keep) {
  check_params(layout, {.tile_rows = params.tile_rows, .group_size = params.group_size});
  if (layout.family != Family::bitmask && layout.family != Family::group_sparse) return params;
  if (!keep.empty() && keep.size() != size_t(shape.N * shape.K))
    throw Error("a mask of {} for [{}, {}]", keep.size(), shape.N, shape.K);
  if (layout.family == Family::group_sparse) {
    params = count_kept_groups(shape, params, keep);
    check_params(layout, params);
    return params;
  }
  params.octets = params.nnz = 0;
  for (int64_t n = 0; n < shape.N; ++n) {
    const auto mask = row_of(keep, n, shape.K);
    const int64_t kept = keep.empty() ? shape.K : shape.K - std::count(mask.begin(), mask.end(), uint8_t{0});
    params.nnz += kept;
    params.octets += (kept + kOctet - 1) / kOctet;
  }
  check_params(layout, params);
  return params;
}

Params pack_grouped(const Layout& layout, Shape shape, Params params, const GroupedCodes& codes,
                    std::vector<std::byte>& out, ThreadPool* pool) {
  if (layout.bits == 0 || layout.bits == 16)
    throw Error(
        "{} does not hold codes in groups along a row; the gq layouts, bm2, bm3, bm4, bm8, gs2, gs3, gs4, gs8 and "
        "nm24_q4 do",
        layout.name);
  const bool two_of_four = layout.family == Family::two_of_four;
  if (two_of_four) {
    if (whole_group(shape.K, params.group_size) != Nm24Q4Block::kCols && shape.K != 0)
      throw Error("{} has groups of {} inputs, got group_size {}", layout.name, Nm24Q4Block::kCols, params.group_size);
    params = {};
  }
  const int64_t size = two_of_four ? Nm24Q4Block::kCols : params.group_size;
  params = complete_params(layout, shape, params, codes.keep);
  begin(layout, shape, params, out);
  check_spans(layout, shape, group_count(shape.K, size), codes);
  if (two_of_four)
    pack_nm24(shape, codes, out, pool);
  else if (layout.family == Family::bitmask)
    pack_bitmask_codes(layout, shape, params, codes, out, pool);
  else if (layout.family == Family::group_sparse)
    pack_group_sparse(layout, shape, params, codes, out, pool);
  else
    pack_gq(layout, shape, params, codes, out, pool);
  return params;
}

Params pack_values(const Layout& layout, Shape shape, Params params, std::span<const float> w,
                   std::span<const uint8_t> keep, std::vector<std::byte>& out, ThreadPool* pool) {
  if (layout.bits != 16) throw Error("{} does not hold plain values under a mask; bm16 and gs16 do", layout.name);
  if (w.size() != size_t(shape.N * shape.K)) throw Error("{} weights for [{}, {}]", w.size(), shape.N, shape.K);
  params = complete_params(layout, shape, params, keep);
  begin(layout, shape, params, out);
  if (layout.family == Family::group_sparse) {
    pack_group_sparse_values(layout, shape, params, w, keep, out, pool);
    return params;
  }
  pack_bitmask(layout, shape, params, keep, out, pool, [&](const BitmaskMap&, int64_t n, std::byte* at) {
    for (int64_t k = 0; k < shape.K; ++k) {
      if (!keep.empty() && keep[size_t(n * shape.K + k)] == 0) continue;
      const float value = w[size_t(n * shape.K + k)];
      const f16 half = to_f16(value);
      if (!fits_half(value))
        throw Error("the weight of input {} is {}, which f16 does not hold; its largest is {}", k, value, kLargestHalf);
      std::memcpy(at, &half, sizeof(half));
      at += sizeof(half);
    }
  });
  return params;
}

void permute_rows(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                  std::span<const int64_t> order, std::span<std::byte> out) {
  assert(layout.family != Family::zigzag && out.size() == bytes.size() && int64_t(order.size()) == shape.N);
  if (layout.family == Family::bitmask) return permute_bitmask_rows(layout, shape, params, bytes, order, out);
  if (layout.family == Family::group_sparse) return permute_group_sparse_rows(layout, shape, params, bytes, order, out);
  const size_t row = shape.N == 0 ? 0 : bytes.size() / size_t(shape.N);
  for (size_t n = 0; n < order.size(); ++n) std::memcpy(&out[n * row], &bytes[size_t(order[n]) * row], row);
}

void round_to_grid(int bits, int64_t group_size, std::span<const float> w, std::span<const uint8_t> keep,
                   std::span<uint8_t> code, std::span<float> scale, std::span<float> zero) {
  const auto K = int64_t(w.size()), g = whole_group(K, group_size);
  const float top = float((1 << bits) - 1);
  for (int64_t i = 0; i < group_count(K, group_size); ++i) {
    const auto begin = size_t(i * g), end = size_t(std::min(K, (i + 1) * g));
    float least = 0, most = 0;
    for (size_t k = begin; k < end; ++k) {
      if (!keep.empty() && keep[k] == 0) continue;
      least = std::min(least, w[k]);
      most = std::max(most, w[k]);
    }
    // Halves first: the difference of two large floats may be none.
    const float step = std::min(kLargestHalf, (most * 0.5f - least * 0.5f) / (top * 0.5f));
    const float s = to_float(to_f16(step));
    const float z = s > 0 ? std::clamp(std::nearbyint(-least / s), 0.0f, top) : 0.0f;
    scale[size_t(i)] = s;
    zero[size_t(i)] = z;
    for (size_t k = begin; k < end; ++k) {
      const bool counts = s > 0 && (keep.empty() || keep[k] != 0);
      code[k] = counts ? uint8_t(std::clamp(std::nearbyint(w[k] / s) + z, 0.0f, top)) : uint8_t{0};
    }
  }
}

bool finite_halves(std::span<const std::byte> bytes) {
  bool finite = true;
  for (size_t at = 0; at + 2 <= bytes.size(); at += 2) {
    uint16_t half;
    std::memcpy(&half, bytes.data() + at, sizeof(half));
    finite &= (half & 0x7c00u) != 0x7c00u;
  }
  return finite;
}

}  // namespace lacuna::layout
