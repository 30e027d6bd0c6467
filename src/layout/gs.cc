#include "layout/gs.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/scalar.h"
#include "layout/octet.h"
#include "layout/row_work.h"
#include "layout/uneven_rows.h"

namespace lacuna::layout {

namespace {

void put_half(float value, std::byte* at) {
  const f16 half = to_f16(value);
  std::memcpy(at, &half, sizeof(half));
}

bool any_kept(std::span<const uint8_t> keep) {
  return std::any_of(keep.begin(), keep.end(), [](uint8_t k) { return k != 0; });
}

/// Writes row_start and masks; `write` writes group i of row n, the matrix's kept group `at`. A group that is kept and
/// dropped in parts is an Error.
template <class Write>
void pack_groups(const GroupSparseMap& map, Shape shape, std::span<const uint8_t> keep, std::span<std::byte> out,
                 ThreadPool* pool, const Write& write) {
  const int64_t K = shape.K;
  std::vector<uint32_t> start(size_t(shape.N) + 1);
  const auto mask_of = [&](int64_t n, int64_t i) {
    return keep.empty() ? keep : keep.subspan(size_t(n * K + i * map.group), size_t(map.width(K, i)));
  };
  each_row(shape.N, pool, [&](int64_t n) {
    std::byte* mask = out.data() + map.mask + n * map.mask_row;
    for (int64_t i = 0; i < map.groups; ++i) {
      const auto group = mask_of(n, i);
      if (!keep.empty() && !any_kept(group)) continue;
      if (const auto dropped = std::find(group.begin(), group.end(), uint8_t{0}); dropped != group.end())
        throw Error(
            "input {} is dropped, but others of its group of {} are kept; a gs layout drops whole groups, the bm "
            "layouts drop any weight",
            i * map.group + (dropped - group.begin()), map.group);
      mask[i / 8] |= std::byte(1 << (i % 8));
      ++start[size_t(n) + 1];
    }
  });
  for (size_t n = 1; n < start.size(); ++n) start[n] += start[n - 1];
  std::memcpy(out.data(), start.data(), start.size() * sizeof(start[0]));
  each_row(shape.N, pool, [&](int64_t n) {
    int64_t at = start[size_t(n)];
    for (int64_t i = 0; i < map.groups; ++i)
      if (is_kept_group(out.data() + map.mask + n * map.mask_row, i)) write(n, i, at++);
  });
}

}  // namespace

GroupSparseMap::GroupSparseMap(const Layout& layout, Shape shape, Params params)
    : bits(layout.bits), group(params.group_size) {
  const auto [N, K] = shape;
  if (!is_sparse_group(group))
    throw Error("group_size is {}, but {} has groups of 8, 16, 32, 64 or 128", group, layout.name);
  groups = K / group + (K % group != 0 ? 1 : 0);
  mask_row = (groups + 7) / 8;
  group_bytes = group / kOctet * bits;
  bool fits = checked_mul(N, K) && N < INT64_MAX;
  const auto section = [&](int64_t at, int64_t count, int64_t size) {  // of `count` items of `size` bytes; its end
    const auto bytes = checked_mul(count, size);
    const auto last = bytes ? checked_add(at, *bytes) : bytes;
    const auto padded = last ? checked_add(*last, kSection - 1) : last;
    fits = fits && padded;
    return fits ? *padded / kSection * kSection : 0;
  };
  const int64_t kept = params.kept_groups;  // below 2^32
  mask = fits ? section(0, N + 1, 4) : 0;
  scale = fits ? section(mask, N, mask_row) : 0;
  zero = fits && bits < 16 ? section(scale, kept, 2) : scale;
  code = fits && bits < 16 ? section(zero, code_bytes(bits, kept), 1) : scale;
  if (fits) section(code, kept, group_bytes);
  if (!fits) throw Error("[{}, {}] in {} is more than 2^63 bytes; the file is damaged", N, K, layout.name);
  end = code + kept * group_bytes;
  if (kept > N * groups)
    throw Error("kept_groups is {}, but [{}, {}] has {} groups of {}; the file is damaged", kept, N, K, N * groups,
                group);
  const int64_t most = kept * group, least = most - std::min(kept, N) * ((group - K % group) % group);
  if (params.nnz > most || params.nnz < least)
    throw Error("{} groups hold {} to {} weights of [{}, {}], but nnz is {}; the file is damaged", kept, least, most, N,
                K, params.nnz);
}

GroupSparseRow group_sparse_row(const GroupSparseMap& map, Shape shape, Params params, std::span<const std::byte> bytes,
                                int64_t n) {
  const int64_t first = row_start(bytes, n), last = row_start(bytes, n + 1);
  const std::byte* mask = bytes.data() + map.mask + n * map.mask_row;
  int64_t kept = 0;
  for (int64_t b = 0; b < map.mask_row; ++b) kept += std::popcount(uint8_t(mask[b]));
  if (first > last || last > params.kept_groups || last - first != kept ||
      (map.groups % 8 != 0 && uint8_t(mask[map.mask_row - 1]) >> (map.groups % 8) != 0))
    throw Error("row {} keeps {} groups of {}, but they are the groups {} to {} of {}; the file is damaged", n, kept,
                (shape.K + map.group - 1) / map.group, first, last, params.kept_groups);
  return {mask, first, kept};
}

void pack_group_sparse(const Layout& layout, Shape shape, Params params, const GroupedCodes& codes,
                       std::span<std::byte> out, ThreadPool* pool) {
  const GroupSparseMap map(layout, shape, params);
  const float top = float((1 << map.bits) - 1);
  std::vector<uint8_t> zeros(size_t(params.kept_groups));
  pack_groups(map, shape, codes.keep, out, pool, [&](int64_t n, int64_t i, int64_t at) {
    const auto number = size_t(n * map.groups + i);
    const float scale = codes.scale[number], zero = codes.zero[number];
    if (!holds_exactly(scale))
      throw Error("the scale of group {} is {}, which f16 does not hold exactly; round it before the codes are chosen",
                  i, scale);
    if (!(zero >= 0 && zero <= top && zero == std::floor(zero)))
      throw Error("the zero of group {} is {}, but {} holds the codes 0 to {} as zeros", i, zero, layout.name, top);
    put_half(scale, out.data() + map.scale + 2 * at);
    zeros[size_t(at)] = uint8_t(zero);
    std::byte* code = out.data() + map.code + at * map.group_bytes;
    const int64_t begin = i * map.group, end = begin + map.width(shape.K, i);
    for (int64_t k = begin; k < end; k += kOctet, code += map.bits) {
      const uint8_t* from = &codes.code[size_t(n * shape.K + k)];
      const int64_t count = std::min(kOctet, end - k);
      for (int64_t j = 0; j < count; ++j)
        if (float(from[j]) > top)
          throw Error("the code of input {} is {}, but {} bits hold 0 to {}", k + j, from[j], map.bits, top);
      write_octet(map.bits, from, count, code);
    }
  });
  for (int64_t at = 0; at < params.kept_groups; at += kOctet)
    write_octet(map.bits, &zeros[size_t(at)], std::min(kOctet, params.kept_groups - at),
                out.data() + map.zero + at / kOctet * map.bits);
}

void pack_group_sparse_values(const Layout& layout, Shape shape, Params params, std::span<const float> w,
                              std::span<const uint8_t> keep, std::span<std::byte> out, ThreadPool* pool) {
  const GroupSparseMap map(layout, shape, params);
  pack_groups(map, shape, keep, out, pool, [&](int64_t n, int64_t i, int64_t at) {
    for (int64_t j = 0; j < map.width(shape.K, i); ++j) {
      const float value = w[size_t(n * shape.K + i * map.group + j)];
      if (!fits_half(value))
        throw Error("the weight of input {} is {}, which f16 does not hold; its largest is {}", i * map.group + j,
                    value, kLargestHalf);
      put_half(value, out.data() + map.code + at * map.group_bytes + 2 * j);
    }
  });
}

Params count_kept_groups(Shape shape, Params params, std::span<const uint8_t> keep) {
  const int64_t g = params.group_size, groups = shape.K / g + (shape.K % g != 0 ? 1 : 0);
  params.kept_groups = params.nnz = 0;
  if (keep.empty()) {
    params.kept_groups = shape.N * groups;
    params.nnz = shape.N * shape.K;
    return params;
  }
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; k += g) {
      const int64_t width = std::min(g, shape.K - k);
      if (!any_kept(keep.subspan(size_t(n * shape.K + k), size_t(width)))) continue;
      ++params.kept_groups;
      params.nnz += width;
    }
  }
  return params;
}

void permute_group_sparse_rows(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                               std::span<const int64_t> order, std::span<std::byte> out) {
  const GroupSparseMap map(layout, shape, params);
  std::ranges::fill(out, std::byte{0});
  std::vector<uint8_t> zeros(map.bits < 16 ? size_t(params.kept_groups) : 0);
  uint32_t start = 0;
  for (int64_t n = 0; n < shape.N; ++n) {
    const GroupSparseRow row = group_sparse_row(map, shape, params, bytes, order[size_t(n)]);
    std::memcpy(out.data() + 4 * n, &start, sizeof(start));
    std::memcpy(out.data() + map.mask + n * map.mask_row, row.mask, size_t(map.mask_row));
    const auto move = [&](int64_t section, int64_t size) {
      std::memcpy(out.data() + section + start * size, bytes.data() + section + row.first * size,
                  size_t(row.kept * size));
    };
    move(map.code, map.group_bytes);
    if (map.bits < 16) {
      move(map.scale, 2);
      for (int64_t i = 0; i < row.kept; ++i)
        zeros[size_t(start + i)] = code_at(map.bits, bytes.data() + map.zero, row.first + i);
    }
    start += uint32_t(row.kept);
  }
  std::memcpy(out.data() + 4 * shape.N, &start, sizeof(start));
  for (int64_t at = 0; at < int64_t(zeros.size()); at += kOctet)
    write_octet(map.bits, &zeros[size_t(at)], std::min(kOctet, int64_t(zeros.size()) - at),
                out.data() + map.zero + at / kOctet * map.bits);
}

int64_t group_sparse_size(const Layout& layout, Shape shape, Params params) {
  return GroupSparseMap(layout, shape, params).end;
}

void decode_group_sparse(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                         int64_t row0, int64_t rows, float* out) {
  const GroupSparseMap map(layout, shape, params);
  for (int64_t n = row0; n < row0 + rows; ++n, out += shape.K) {
    const GroupSparseRow row = group_sparse_row(map, shape, params, bytes, n);
    std::fill(out, out + shape.K, 0.0f);
    for (int64_t i = 0, at = row.first; i < map.groups; ++i) {
      if (!is_kept_group(row.mask, i)) continue;
      float* w = out + i * map.group;
      const int64_t width = map.width(shape.K, i);
      const std::byte* code = bytes.data() + map.code + at * map.group_bytes;
      if (map.bits == 16) {
        for (int64_t j = 0; j < width; ++j) w[j] = half_at(code + 2 * j);
      } else {
        const float scale = half_at(bytes.data() + map.scale + 2 * at);
        const float zero = float(code_at(map.bits, bytes.data() + map.zero, at));
        for (int64_t j = 0; j < width; ++j) w[j] = scale * (float(code_at(map.bits, code, j)) - zero);
      }
      ++at;
    }
  }
}

int64_t first_bad_group_sparse_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  const GroupSparseMap map(layout, shape, params);
  const auto part = [&](int64_t begin, int64_t end) { return bytes.subspan(size_t(begin), size_t(end - begin)); };
  const int64_t N = shape.N, last_width = map.groups == 0 ? 0 : map.width(shape.K, map.groups - 1);
  int64_t groups = 0, kept = 0;
  for (int64_t n = 0; n < N; ++n) {
    if (row_start(bytes, n) != groups) return n;
    try {
      const GroupSparseRow row = group_sparse_row(map, shape, params, bytes, n);
      groups += row.kept;
      kept += row.kept * map.group;
      const auto codes = part(map.code + row.first * map.group_bytes, map.code + groups * map.group_bytes);
      if (map.bits == 16 ? !finite_halves(codes)
                         : !finite_halves(part(map.scale + 2 * row.first, map.scale + 2 * groups)))
        return n;
      if (last_width == map.group || row.kept == 0 || !is_kept_group(row.mask, map.groups - 1)) continue;
      kept -= map.group - last_width;
      const std::byte* last = codes.data() + (row.kept - 1) * map.group_bytes;
      for (int64_t j = last_width; j < map.group; ++j)
        if (map.bits == 16 ? !all_zero({last + 2 * j, 2}) : code_at(map.bits, last, j) != 0) return n;
    } catch (const Error&) {
      return n;
    }
  }
  const int64_t zeros = code_bytes(map.bits, params.kept_groups);
  bool sound = groups == params.kept_groups && kept == params.nnz && row_start(bytes, N) == groups &&
               all_zero(part(4 * (N + 1), map.mask)) && all_zero(part(map.mask + N * map.mask_row, map.scale));
  if (map.bits < 16) {
    sound = sound && all_zero(part(map.scale + 2 * groups, map.zero)) && all_zero(part(map.zero + zeros, map.code));
    if (const int used = int(groups * map.bits % 8); sound && used != 0)
      sound = uint8_t(bytes[size_t(map.zero + zeros - 1)]) >> used == 0;
  }
  return sound || N == 0 ? -1 : N - 1;
}

}  // namespace lacuna::layout
