#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"
#include "kernels/cuda/rows.h"
#include "layout/gq.h"
#include "layout/nm24_q4.h"
#include "layout/q2_K.h"
#include "layout/q3_K.h"
#include "layout/q4_0.h"
#include "layout/q4_1.h"
#include "layout/q4_K.h"
#include "layout/q5_0.h"
#include "layout/q5_1.h"
#include "layout/q5_K.h"
#include "layout/q6_K.h"
#include "layout/q8_0.h"

namespace lacuna::cuda {
namespace {

constexpr int kUnit = 32;  // columns

template <class Block>
Block read(const std::byte* from) {
  Block block;
  std::memcpy(&block, from, sizeof(block));
  return block;
}

template <class... T>
void write(std::byte* to, const T&... values) {
  ((std::memcpy(to, &values, sizeof(values)), to += sizeof(values)), ...);
}

/// Bits 0..3 of 32 codes.
void put_nibbles(const uint8_t* code, std::byte* to) {
  for (int j = 0; j < 16; ++j) to[j] = std::byte((code[j] & 15) | (code[j + 16] & 15) << 4);
}
/// `bits` (1 or 2) bits from `first` on of 32 codes: 4 or 8 bytes.
void put_bits(const uint8_t* code, int first, int bits, std::byte* to) {
  std::memset(to, 0, size_t{4} * size_t(bits));
  const int groups = 8 / bits;  // of four weights in a word
  for (int k = 0; k < kUnit; ++k) {
    const int t = k / 4;
    to[t / groups * 4 + k % 4] |= std::byte((code[k] >> first & ((1 << bits) - 1)) << (t % groups * bits));
  }
}

void split_q4_0(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q4_0Block>(from);
  write(planes[0], block.code);
  write(planes[1], block.scale);
}

void split_q4_1(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q4_1Block>(from);
  write(planes[0], block.code);
  write(planes[1], block.scale, block.min);
}

/// Bits of `high` are in the order of the weights.
void put_high_bits(const uint8_t* high, std::byte* to) {
  uint8_t code[kUnit];
  for (int k = 0; k < kUnit; ++k) code[k] = high[k / 8] >> (k % 8) & 1;
  put_bits(code, 0, 1, to);
}

void split_q5_0(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q5_0Block>(from);
  write(planes[0], block.low);
  put_high_bits(block.high, planes[1]);
  write(planes[2], block.scale);
}

void split_q5_1(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q5_1Block>(from);
  write(planes[0], block.low);
  put_high_bits(block.high, planes[1]);
  write(planes[2], block.scale, block.min);
}

void split_q8_0(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q8_0Block>(from);
  std::memcpy(planes[0], block.code, 16);
  std::memcpy(planes[1], block.code + 16, 16);
  write(planes[2], block.scale);
}

void split_q2_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q2KBlock>(from);
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    for (int l = 0; l < kUnit; ++l) code[l] = block.code[u / 4 * 32 + l] >> (u % 4 * 2) & 3;
    put_bits(code, 0, 2, planes[0] + 8 * u);
  }
  write(planes[1], block.scale_min);
  write(planes[2], block.d, block.dmin);
}

void split_q3_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q3KBlock>(from);
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    for (int l = 0; l < kUnit; ++l)
      code[l] = uint8_t((block.low[u / 4 * 32 + l] >> (u % 4 * 2) & 3) | (block.high[l] >> u & 1) << 2);
    put_bits(code, 0, 2, planes[0] + 8 * u);
    put_bits(code, 2, 1, planes[1] + 4 * u);
  }
  int8_t scale[16];
  for (int s = 0; s < 16; ++s)
    scale[s] =
        int8_t(((block.scale[s % 8] >> (s < 8 ? 0 : 4) & 15) | (block.scale[8 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32);
  write(planes[2], scale);
  write(planes[3], block.d);
}

/// Codes of sub-blocks of 32 in pairs, as q4_K and q5_K have them.
void put_paired_nibbles(const uint8_t* low, std::byte* to) {
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    for (int l = 0; l < kUnit; ++l) code[l] = low[u / 2 * 32 + l] >> (u % 2 * 4) & 15;
    put_nibbles(code, to + 16 * u);
  }
}

void split_q4_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q4KBlock>(from);
  put_paired_nibbles(block.code, planes[0]);
  write(planes[1], block.d, block.dmin, block.scale_min);
}

void split_q5_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q5KBlock>(from);
  put_paired_nibbles(block.low, planes[0]);
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    for (int l = 0; l < kUnit; ++l) code[l] = block.high[l] >> u & 1;
    put_bits(code, 0, 1, planes[1] + 4 * u);
  }
  write(planes[2], block.d, block.dmin, block.scale_min);
}

void split_q6_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read<layout::Q6KBlock>(from);
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    const int half = u / 4, quarter = u % 4;
    for (int l = 0; l < kUnit; ++l)
      code[l] = uint8_t((block.low[64 * half + 32 * (quarter % 2) + l] >> (quarter / 2 * 4) & 15) |
                        (block.high[32 * half + l] >> (quarter * 2) & 3) << 4);
    put_nibbles(code, planes[0] + 16 * u);
    put_bits(code, 4, 2, planes[1] + 8 * u);
  }
  write(planes[2], block.scale);
  write(planes[3], block.d);
}

using layout::Id;
constexpr RowForm kForms[] = {
    {Id::f32, {{4, 1}}, nullptr},
    {Id::f16, {{2, 1}}, nullptr},
    {Id::bf16, {{2, 1}}, nullptr},
    {Id::q4_0, {{16, 32}, {2, 32}}, split_q4_0},
    {Id::q4_1, {{16, 32}, {4, 32}}, split_q4_1},
    {Id::q5_0, {{16, 32}, {4, 32}, {2, 32}}, split_q5_0},
    {Id::q5_1, {{16, 32}, {4, 32}, {4, 32}}, split_q5_1},
    {Id::q8_0, {{16, 32}, {16, 32}, {2, 32}}, split_q8_0},
    {Id::q2_K, {{8, 32}, {2, 32}, {4, 256}}, split_q2_K},
    {Id::q3_K, {{8, 32}, {4, 32}, {2, 32}, {2, 256}}, split_q3_K},
    {Id::q4_K, {{16, 32}, {16, 256}}, split_q4_K},
    {Id::q5_K, {{16, 32}, {4, 32}, {16, 256}}, split_q5_K},
    {Id::q6_K, {{16, 32}, {8, 32}, {2, 32}, {2, 256}}, split_q6_K},
};

/// Grouped rows: planes of codes; scales and zeros follow in kGroupPlane.
constexpr RowForm kGroupedForms[] = {
    {Id::gq2, {{8, 32}}, nullptr},      {Id::gq3, {{8, 32}, {4, 32}}, nullptr},
    {Id::gq4, {{16, 32}}, nullptr},     {Id::gq8, {{16, 32}, {16, 32}}, nullptr},
    {Id::nm24_q4, {{16, 32}}, nullptr},
};

const RowForm* grouped_form(const layout::Layout& layout) {
  for (const RowForm& form : kGroupedForms)
    if (form.id == layout.id) return &form;
  return nullptr;
}

/// Inputs that share scale and zero: at most K.
int64_t group_size_of(const layout::Layout& layout, int64_t K, layout::Params params) {
  const int64_t g = layout.id == Id::nm24_q4 ? layout::Nm24Q4Block::kCols : params.group_size;
  return g == 0 || g > K ? K : g;
}

/// The kernels find a group by a multiplication in 64 bits.
constexpr int64_t kMostGroupedInputs = int64_t{1} << 18;

/// Codes, scales and zeros of row n.
struct GroupedRow {
  std::vector<uint8_t> code;  // [K], then zeros up to a whole unit
  std::vector<float> scale, zero;
};
void read_grouped_row(const layout::Layout& layout, layout::Shape shape, int64_t g, const std::byte* from,
                      GroupedRow& row) {
  const int64_t K = shape.K, groups = (K + g - 1) / g;
  row.code.assign(size_t((K + kUnit - 1) / kUnit * kUnit), 0);
  row.scale.resize(size_t(groups));
  row.zero.resize(size_t(groups));
  if (layout.id != Id::nm24_q4) {
    const std::span<const std::byte> bytes(from, size_t(layout::gq_row_bytes(layout.bits, K, g)));
    layout::read_gq_row(layout.bits, bytes, std::span(row.code).first(size_t(K)), row.scale, row.zero);
    return;
  }
  constexpr uint8_t kNothing = 8;  // scale (8 - 8) is 0
  std::fill_n(row.code.begin(), K, kNothing);
  for (int64_t b = 0; b < groups; ++b, from += sizeof(layout::Nm24Q4Block)) {
    const auto block = read<layout::Nm24Q4Block>(from);
    row.scale[size_t(b)] = to_float(block.scale);
    row.zero[size_t(b)] = kNothing;
    for (int64_t i = 0; i < layout::Nm24Q4Block::kKept; ++i) {
      const int64_t place = i / 2 * 4 + (block.index[i / 4] >> (i % 4 * 2) & 3);
      row.code[size_t(b * layout::Nm24Q4Block::kCols + place)] = block.code[i / 2] >> (i % 2 * 4) & 15;
    }
  }
}

void write_grouped_row(const layout::Layout& layout, const RowPlaces& places, const GroupedRow& row, std::byte* to) {
  for (size_t u = 0; u < row.code.size() / kUnit; ++u) {
    const uint8_t* const code = &row.code[u * kUnit];
    std::byte* const first = to + places.plane[0];
    switch (layout.bits) {
      case 2:
        put_bits(code, 0, 2, first + 8 * u);
        break;
      case 3:
        put_bits(code, 0, 2, first + 8 * u);
        put_bits(code, 2, 1, to + places.plane[1] + 4 * u);
        break;
      case 8:
        std::memcpy(first + 16 * u, code, 16);
        std::memcpy(to + places.plane[1] + 16 * u, code + 16, 16);
        break;
      default:
        put_nibbles(code, first + 16 * u);
    }
  }
  for (size_t i = 0; i < row.scale.size(); ++i)
    write(to + places.plane[kGroupPlane] + 4 * i, to_f16(row.scale[i]), to_f16(row.zero[i]));
}

}  // namespace

const RowForm& row_form(const layout::Layout& layout) {
  for (const RowForm& form : kForms)
    if (form.id == layout.id) return form;
  if (const RowForm* form = grouped_form(layout)) return *form;
  throw Error("--device cuda: no kernel reads rows of {}; those that one reads: {}, gq2, gq3, gq4, gq8, nm24_q4",
              layout.name, layout::known_row_names());
}

RowPlaces row_places(const layout::Layout& layout, int64_t K, layout::Params params) {
  RowPlaces places;
  const RowForm& form = row_form(layout);
  const bool grouped = grouped_form(layout) != nullptr;
  for (int p = 0; p < kMostPlanes; ++p) {
    places.plane[p] = places.row_bytes;
    const RowPlane& plane = form.planes[p];
    const int64_t entries = grouped ? (K + kUnit - 1) / kUnit : K / plane.columns;
    places.row_bytes += (entries * plane.bytes + 15) / 16 * 16;
  }
  if (!grouped) return places;
  const int64_t g = group_size_of(layout, K, params);
  if (K > kMostGroupedInputs)
    throw Error("--device cuda: K = {} of {}, but the kernels take at most {} inputs", K, layout.name,
                kMostGroupedInputs);
  if (g < K && g % 16 != 0)
    throw Error(
        "--device cuda: {} has groups of {} inputs; the kernels read groups of 16, 32, 48 and so on, or whole "
        "rows",
        layout.name, g);
  places.row_bytes = places.plane[kGroupPlane] + ((K + g - 1) / g * 4 + 15) / 16 * 16;
  if (g < K) places.group_factor = uint32_t(((int64_t{1} << 31) + g / 16 - 1) / (g / 16));
  return places;
}

void prepare_rows(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                  std::span<const std::byte> bytes, ThreadPool& pool, std::byte* out) {
  const RowForm& form = row_form(layout);
  const RowPlaces places = row_places(layout, shape.K, params);
  if (grouped_form(layout) != nullptr) {
    const int64_t g = group_size_of(layout, shape.K, params);
    const auto canonical = int64_t(bytes.size()) / std::max<int64_t>(1, shape.N);
    pool.parallel_for(shape.N, 16, [&](int64_t begin, int64_t end) {
      GroupedRow row;
      for (int64_t n = begin; n < end; ++n) {
        read_grouped_row(layout, shape, g, bytes.data() + n * canonical, row);
        std::memset(out + n * places.row_bytes, 0, size_t(places.row_bytes));
        write_grouped_row(layout, places, row, out + n * places.row_bytes);
      }
    });
    return;
  }
  const int64_t canonical = layout.row_bytes(shape.K);
  assert(int64_t(bytes.size()) == shape.N * canonical);
  pool.parallel_for(shape.N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const std::byte* from = bytes.data() + n * canonical;
      std::byte* row = out + n * places.row_bytes;
      std::memset(row, 0, size_t(places.row_bytes));
      if (form.split == nullptr) {
        std::memcpy(row, from, size_t(canonical));
        continue;
      }
      std::byte* planes[kMostPlanes];
      for (int p = 0; p < kMostPlanes; ++p) planes[p] = row + places.plane[p];
      for (int64_t k = 0; k < shape.K; k += layout.block_cols, from += layout.block_bytes) {
        form.split(from, planes);
        for (int p = 0; p < kMostPlanes; ++p)
          planes[p] += layout.block_cols / form.planes[p].columns * form.planes[p].bytes;
      }
    }
  });
}

}  // namespace lacuna::cuda
