#include "layout/slice.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <numeric>

#include "layout/bm.h"
#include "layout/gq.h"
#include "layout/grouped.h"
#include "layout/gs.h"
#include "layout/octet.h"
#include "layout/row_work.h"
#include "layout/tensor_core.h"
#include "layout/zigzag.h"

namespace lacuna::layout {
namespace {

[[maybe_unused]] bool is_slice(const Layout& layout, Shape shape, Params params, const Slice& s) {
  const auto whole = [](int64_t first, int64_t count, int64_t all, int64_t unit) {
    return first >= 0 && count > 0 && first + count <= all && first % unit == 0 &&
           (count % unit == 0 || first + count == all);
  };
  return whole(s.row0, s.rows, shape.N, row_unit(layout)) &&
         whole(s.column0, s.columns, shape.K, column_unit(layout, shape, params));
}

bool bit_at(const std::byte* mask, int64_t i) { return (uint8_t(mask[i / 8]) >> (i % 8) & 1) != 0; }

/// How many of the bits [first, first + count) are set.
int64_t count_bits(const std::byte* mask, int64_t first, int64_t count) {
  int64_t sum = 0, i = first;
  const int64_t end = first + count;
  for (; i < end && i % 8 != 0; ++i) sum += bit_at(mask, i);
  for (; i + 64 <= end; i += 64) {
    uint64_t word;
    std::memcpy(&word, mask + i / 8, sizeof(word));
    sum += std::popcount(word);
  }
  for (; i < end; ++i) sum += bit_at(mask, i);
  return sum;
}

/// Bits [first, first + count) to the beginning of `to`, which is zeros.
void copy_bits(const std::byte* from, int64_t first, int64_t count, std::byte* to) {
  int64_t i = 0;
  if (first % 8 == 0) {
    std::memcpy(to, from + first / 8, size_t(count / 8));
    i = count / 8 * 8;
  }
  for (; i < count; ++i) to[i / 8] |= std::byte(uint8_t(bit_at(from, first + i)) << (i % 8));
}

/// Codes [first, first + count) of a string to the beginning of `to`.
void copy_codes(int bits, const std::byte* from, int64_t first, int64_t count, std::byte* to) {
  for (int64_t i = 0; i < count; i += kOctet) {
    uint8_t code[kOctet] = {};
    const int64_t n = std::min(kOctet, count - i);
    for (int64_t j = 0; j < n; ++j) code[j] = code_at(bits, from, first + i + j);
    write_octet(bits, code, n, to + i / kOctet * bits);
  }
}

void put_start(std::span<std::byte> out, int64_t n, uint32_t start) {
  std::memcpy(out.data() + 4 * n, &start, sizeof(start));
}

/// Rows of blocks.
void slice_blocks(const Layout& layout, Shape shape, std::span<const std::byte> bytes, const Slice& s,
                  std::span<std::byte> out, ThreadPool* pool) {
  const int64_t from_row = layout.row_bytes(shape.K), to_row = layout.row_bytes(s.columns);
  each_row(s.rows, pool, [&](int64_t n) {
    std::memcpy(out.data() + n * to_row, bytes.data() + (s.row0 + n) * from_row + layout.row_bytes(s.column0),
                size_t(to_row));
  });
}

void slice_zigzag(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, const Slice& s,
                  std::span<std::byte> out, ThreadPool* pool) {
  const ZigzagMap from(shape, params), to({s.rows, s.columns}, params);
  const int64_t first = s.row0 / kSuperRows, size = layout.block_bytes;
  each_row(s.columns, pool, [&](int64_t k) {
    for (int64_t r = 0; r < to.rows; ++r)
      std::memcpy(out.data() + to.index(r, k) * size, bytes.data() + from.index(first + r, s.column0 + k) * size,
                  size_t(size));
  });
}

void slice_gq(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, const Slice& s,
              std::span<std::byte> out, ThreadPool* pool) {
  const int bits = layout.bits;
  const int64_t g = whole_group(shape.K, params.group_size), G = group_count(shape.K, params.group_size);
  const int64_t first = s.column0 / g, kept = group_count(s.columns, params.group_size);
  const int64_t from_row = gq_row_bytes(bits, shape.K, params.group_size);
  const int64_t to_row = gq_row_bytes(bits, s.columns, params.group_size);
  each_row(s.rows, pool, [&](int64_t n) {
    const std::byte* const from = bytes.data() + (s.row0 + n) * from_row;
    std::byte* const to = out.data() + n * to_row;
    std::memcpy(to, from + 2 * first, size_t(2 * kept));
    std::memcpy(to + 2 * kept, from + 2 * (G + first), size_t(2 * kept));
    std::memcpy(to + 4 * kept, from + 4 * G + s.column0 / kOctet * bits, size_t(code_bytes(bits, s.columns)));
  });
}

void slice_bitmask(const Layout& layout, Shape shape, Params params, Params sliced, std::span<const std::byte> bytes,
                   const Slice& s, std::span<std::byte> out, ThreadPool* pool) {
  const BitmaskMap from(layout, shape, params), to(layout, {s.rows, s.columns}, sliced);
  const int bits = layout.bits;
  const int64_t first_group = s.column0 / whole_group(shape.K, params.group_size);
  std::vector<int64_t> start(size_t(s.rows) + 1);
  each_row(s.rows, pool, [&](int64_t n) {
    const BitmaskRow row = bitmask_row(from, shape, params, bytes, s.row0 + n);
    start[size_t(n) + 1] = (count_bits(row.mask, s.column0, s.columns) + kOctet - 1) / kOctet;
  });
  std::partial_sum(start.begin(), start.end(), start.begin());
  for (int64_t n = 0; n <= s.rows; ++n) put_start(out, n, uint32_t(start[size_t(n)]));
  each_row(s.rows, pool, [&](int64_t n) {
    const BitmaskRow row = bitmask_row(from, shape, params, bytes, s.row0 + n);
    const int64_t skipped = count_bits(row.mask, 0, s.column0), kept = count_bits(row.mask, s.column0, s.columns);
    copy_bits(row.mask, s.column0, s.columns, out.data() + to.mask + n * to.mask_row);
    std::byte* const code = out.data() + to.code + start[size_t(n)] * bits;
    if (bits == 16) {
      std::memcpy(code, row.code + 2 * skipped, size_t(2 * kept));
      return;
    }
    copy_codes(bits, row.code, skipped, kept, code);
    for (const auto& [source, target] : {std::pair{from.scale, to.scale}, std::pair{from.zero, to.zero}})
      std::memcpy(out.data() + target + 2 * n * to.groups,
                  bytes.data() + source + 2 * ((s.row0 + n) * from.groups + first_group), size_t(2 * to.groups));
  });
}

void slice_group_sparse(const Layout& layout, Shape shape, Params params, Params sliced,
                        std::span<const std::byte> bytes, const Slice& s, std::span<std::byte> out, ThreadPool* pool) {
  const GroupSparseMap from(layout, shape, params), to(layout, {s.rows, s.columns}, sliced);
  const int bits = layout.bits;
  const int64_t first_group = s.column0 / from.group;
  std::vector<int64_t> start(size_t(s.rows) + 1);
  std::vector<uint8_t> zeros(bits < 16 ? size_t(sliced.kept_groups) : 0);
  each_row(s.rows, pool, [&](int64_t n) {
    const GroupSparseRow row = group_sparse_row(from, shape, params, bytes, s.row0 + n);
    start[size_t(n) + 1] = count_bits(row.mask, first_group, to.groups);
  });
  std::partial_sum(start.begin(), start.end(), start.begin());
  for (int64_t n = 0; n <= s.rows; ++n) put_start(out, n, uint32_t(start[size_t(n)]));
  each_row(s.rows, pool, [&](int64_t n) {
    const GroupSparseRow row = group_sparse_row(from, shape, params, bytes, s.row0 + n);
    const int64_t at = start[size_t(n)], kept = start[size_t(n) + 1] - at;
    const int64_t source = row.first + count_bits(row.mask, 0, first_group);
    copy_bits(row.mask, first_group, to.groups, out.data() + to.mask + n * to.mask_row);
    std::memcpy(out.data() + to.code + at * to.group_bytes, bytes.data() + from.code + source * from.group_bytes,
                size_t(kept * to.group_bytes));
    if (bits == 16) return;
    std::memcpy(out.data() + to.scale + 2 * at, bytes.data() + from.scale + 2 * source, size_t(2 * kept));
    for (int64_t i = 0; i < kept; ++i) zeros[size_t(at + i)] = code_at(bits, bytes.data() + from.zero, source + i);
  });
  for (size_t i = 0; i < zeros.size(); i += size_t(kOctet))
    write_octet(bits, &zeros[i], std::min(kOctet, int64_t(zeros.size() - i)),
                out.data() + to.zero + int64_t(i) / kOctet * bits);
}

void slice_tensor_core(const Layout& layout, Shape shape, std::span<const std::byte> bytes, const Slice& s,
                       std::span<std::byte> out, ThreadPool* pool) {
  const TensorCoreRow from = tensor_core_row(layout, shape.K), to = tensor_core_row(layout, s.columns);
  const int64_t width = from.scaled ? 1 : 2, first = from.sparse ? s.column0 / 2 : s.column0;
  each_row(s.rows, pool, [&](int64_t n) {
    const std::byte* const source = bytes.data() + (s.row0 + n) * from.bytes;
    std::byte* const target = out.data() + n * to.bytes;
    if (to.scaled) std::memcpy(target, source, sizeof(float));
    if (to.sparse) std::memcpy(target + to.index, source + from.index + s.column0 / 8, size_t(to.values - to.index));
    std::memcpy(target + to.values, source + from.values + first * width, size_t(to.kept * width));
  });
}

}  // namespace

int64_t row_unit(const Layout& layout) { return layout.zigzag ? kSuperRows : 1; }

int64_t column_unit(const Layout& layout, Shape shape, Params params) {
  switch (layout.family) {
    case Family::grouped:
    case Family::bitmask: {
      const int64_t g = whole_group(shape.K, params.group_size);
      return g == shape.K || layout.bits == 16 ? kOctet : std::lcm(kOctet, g);
    }
    case Family::group_sparse:
      return params.group_size;
    case Family::zigzag:
      return 1;
    case Family::tensor_core:
      return tensor_core_row(layout, shape.K).sparse ? kOctet : 1;
    case Family::rows:
    case Family::two_of_four:
      break;
  }
  return layout.block_cols;
}

Params slice_params(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                    const Slice& s) {
  assert(is_slice(layout, shape, params, s));
  Params out = params;
  if (!counts_kept(layout)) return out;
  out.octets = out.kept_groups = out.nnz = 0;
  if (layout.family == Family::bitmask) {
    const BitmaskMap map(layout, shape, params);
    for (int64_t n = s.row0; n < s.row0 + s.rows; ++n) {
      const int64_t kept = count_bits(bitmask_row(map, shape, params, bytes, n).mask, s.column0, s.columns);
      out.octets += (kept + kOctet - 1) / kOctet;
      out.nnz += kept;
    }
    return out;
  }
  const GroupSparseMap map(layout, shape, params);
  const int64_t first = s.column0 / map.group, groups = (s.columns + map.group - 1) / map.group;
  for (int64_t n = s.row0; n < s.row0 + s.rows; ++n) {
    const std::byte* const mask = group_sparse_row(map, shape, params, bytes, n).mask;
    const int64_t kept = count_bits(mask, first, groups);
    out.kept_groups += kept;
    out.nnz += kept * map.group;
    if (is_kept_group(mask, first + groups - 1)) out.nnz -= map.group - map.width(shape.K, first + groups - 1);
  }
  return out;
}

std::vector<std::byte> slice_bytes(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                                   const Slice& s, ThreadPool* pool) {
  const Params sliced = slice_params(layout, shape, params, bytes, s);
  std::vector<std::byte> out(size_t(layout.size_bytes({s.rows, s.columns}, sliced)));
  switch (layout.family) {
    case Family::rows:
    case Family::two_of_four:
      slice_blocks(layout, shape, bytes, s, out, pool);
      break;
    case Family::zigzag:
      slice_zigzag(layout, shape, params, bytes, s, out, pool);
      break;
    case Family::grouped:
      slice_gq(layout, shape, params, bytes, s, out, pool);
      break;
    case Family::bitmask:
      slice_bitmask(layout, shape, params, sliced, bytes, s, out, pool);
      break;
    case Family::group_sparse:
      slice_group_sparse(layout, shape, params, sliced, bytes, s, out, pool);
      break;
    case Family::tensor_core:
      slice_tensor_core(layout, shape, bytes, s, out, pool);
      break;
  }
  return out;
}

}  // namespace lacuna::layout
