#include "layout/bsr.h"

#include <algorithm>
#include <cstring>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/scalar.h"
#include "layout/gs.h"
#include "layout/octet.h"

namespace lacuna::layout {
namespace {

int64_t groups_of_row(int64_t K, int64_t group_size) { return K / group_size + (K % group_size != 0 ? 1 : 0); }

void check_group_size(int64_t group_size) {
  if (group_size < 1) throw Error("BSR: group_size is {}, but it must be 1 or more", group_size);
}

void check_arrays(const Bsr& bsr) {
  const auto [N, K] = bsr.shape;
  check_group_size(bsr.group_size);
  if (N < 0 || K < 0 || !checked_mul(N, K)) throw Error("BSR: the shape is [{}, {}], which cannot be", N, K);
  const auto kept = bsr.groups.size();
  if (int64_t(bsr.row_index.size()) - 1 != N || bsr.row_index.front() != 0 || bsr.row_index.back() != int64_t(kept))
    throw Error("BSR: row_index must have {} numbers from 0 to the {} groups", N + 1, kept);
  const auto values = checked_mul(int64_t(kept), bsr.group_size);
  if (!values || int64_t(bsr.values.size()) != *values || bsr.scale.size() != kept || bsr.zero.size() != kept)
    throw Error(
        "BSR: {} groups of {} need as many values, and a scale and a zero each; got {} values, {} scales, {} zeros",
        kept, bsr.group_size, bsr.values.size(), bsr.scale.size(), bsr.zero.size());
  const int64_t groups = groups_of_row(K, bsr.group_size);
  for (int64_t n = 0; n < N; ++n)
    if (const int64_t begin = bsr.row_index[size_t(n)], end = bsr.row_index[size_t(n) + 1];
        begin > end || end > int64_t(kept))
      throw Error("BSR: row {} has the groups {} to {} of {}; row_index must not descend", n, begin, end, kept);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t begin = bsr.row_index[size_t(n)], end = bsr.row_index[size_t(n) + 1];
    for (int64_t j = begin; j < end; ++j) {
      const int64_t i = bsr.groups[size_t(j)], least = j == begin ? 0 : bsr.groups[size_t(j) - 1] + 1;
      if (i < least || i >= groups)
        throw Error("BSR: group {} of row {} is {}, but it must lie between {} and {}", j - begin, n, i, least,
                    groups - 1);
      for (int64_t k = K - i * bsr.group_size; k < bsr.group_size; ++k)
        if (bsr.values[size_t(j * bsr.group_size + k)] != 0)
          throw Error("BSR: row {} has a value for input {}, but K is {}", n, i * bsr.group_size + k, K);
    }
  }
}

}  // namespace

Bsr to_bsr(Shape shape, int64_t group_size, const GroupedCodes& codes) {
  check_group_size(group_size);
  const int64_t K = shape.K, groups = groups_of_row(K, group_size);
  const auto weights = size_t(shape.N * K), numbers = size_t(shape.N * groups);
  if (codes.code.size() != weights || (!codes.keep.empty() && codes.keep.size() != weights) ||
      codes.scale.size() != numbers || codes.zero.size() != numbers)
    throw Error("BSR: [{}, {}] in groups of {} needs {} codes, {} scales and zeros; got {}, {} and {}", shape.N, K,
                group_size, weights, numbers, codes.code.size(), codes.scale.size(), codes.zero.size());
  Bsr out{shape, group_size, {0}, {}, {}, {}, {}};
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t i = 0; i < groups; ++i) {
      const auto begin = size_t(n * K + i * group_size), width = size_t(std::min(group_size, K - i * group_size));
      if (!codes.keep.empty()) {
        const auto keep = codes.keep.subspan(begin, width);
        const auto dropped = size_t(std::ranges::count(keep, uint8_t{0}));
        if (dropped == width) continue;
        if (dropped != 0)
          throw Error("BSR: row {} keeps {} of the {} weights of group {}", n, width - dropped, width, i);
      }
      out.groups.push_back(i);
      const auto code = codes.code.subspan(begin, width);
      out.values.insert(out.values.end(), code.begin(), code.end());
      out.values.resize(out.groups.size() * size_t(group_size));
      out.scale.push_back(codes.scale[size_t(n * groups + i)]);
      out.zero.push_back(codes.zero[size_t(n * groups + i)]);
    }
    out.row_index.push_back(int64_t(out.groups.size()));
  }
  return out;
}

DenseCodes from_bsr(const Bsr& bsr) {
  check_arrays(bsr);
  const int64_t N = bsr.shape.N, K = bsr.shape.K, g = bsr.group_size, groups = groups_of_row(K, g);
  DenseCodes out;
  out.code.resize(size_t(N * K));
  out.keep.resize(out.code.size());
  out.scale.resize(size_t(N * groups));
  out.zero.resize(out.scale.size());
  for (int64_t n = 0; n < N; ++n) {
    for (auto j = size_t(bsr.row_index[size_t(n)]); j < size_t(bsr.row_index[size_t(n) + 1]); ++j) {
      const int64_t i = bsr.groups[j];
      const auto at = size_t(n * K + i * g), width = size_t(std::min(g, K - i * g));
      std::memcpy(&out.code[at], &bsr.values[j * size_t(g)], width);
      std::fill_n(out.keep.begin() + ptrdiff_t(at), width, uint8_t{1});
      out.scale[size_t(n * groups + i)] = bsr.scale[j];
      out.zero[size_t(n * groups + i)] = bsr.zero[j];
    }
  }
  return out;
}

Params import_bsr(const Layout& layout, const Bsr& bsr, std::vector<std::byte>& out, ThreadPool* pool) {
  if (layout.family != Family::group_sparse || layout.bits == 16)
    throw Error("BSR: {} does not hold codes of kept groups; gs2, gs3, gs4 and gs8 do", layout.name);
  return pack_grouped(layout, bsr.shape, {.group_size = bsr.group_size}, from_bsr(bsr).codes(), out, pool);
}

Bsr export_bsr(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  if (layout.family != Family::group_sparse || layout.bits == 16)
    throw Error("BSR: {} does not hold codes of kept groups; gs2, gs3, gs4 and gs8 do", layout.name);
  const GroupSparseMap map(layout, shape, params);
  Bsr out{shape, params.group_size, {0}, {}, {}, {}, {}};
  for (int64_t n = 0; n < shape.N; ++n) {
    const GroupSparseRow row = group_sparse_row(map, shape, params, bytes, n);
    for (int64_t i = 0; i < map.groups; ++i)
      if (is_kept_group(row.mask, i)) out.groups.push_back(i);
    for (int64_t at = row.first; at < row.first + row.kept; ++at) {
      const std::byte* code = bytes.data() + map.code + at * map.group_bytes;
      for (int64_t j = 0; j < map.group; ++j) out.values.push_back(code_at(map.bits, code, j));
      f16 scale;
      std::memcpy(&scale, bytes.data() + map.scale + 2 * at, sizeof(scale));
      out.scale.push_back(to_float(scale));
      out.zero.push_back(float(code_at(map.bits, bytes.data() + map.zero, at)));
    }
    out.row_index.push_back(int64_t(out.groups.size()));
  }
  return out;
}

}  // namespace lacuna::layout
