#include <algorithm>
#include <cassert>
#include <cstring>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/scalar.h"
#include "kernels/cuda/rows.h"
#include "layout/bm.h"
#include "layout/gq.h"
#include "layout/grouped.h"
#include "layout/nm24_q4.h"
#include "layout/octet.h"
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
Block read_as(const std::byte* from) {
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
  const auto block = read_as<layout::Q4_0Block>(from);
  write(planes[0], block.code);
  write(planes[1], block.scale);
}

void split_q4_1(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q4_1Block>(from);
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
  const auto block = read_as<layout::Q5_0Block>(from);
  write(planes[0], block.low);
  put_high_bits(block.high, planes[1]);
  write(planes[2], block.scale);
}

void split_q5_1(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q5_1Block>(from);
  write(planes[0], block.low);
  put_high_bits(block.high, planes[1]);
  write(planes[2], block.scale, block.min);
}

void split_q8_0(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q8_0Block>(from);
  std::memcpy(planes[0], block.code, 16);
  std::memcpy(planes[1], block.code + 16, 16);
  write(planes[2], block.scale);
}

void split_q2_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q2KBlock>(from);
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    for (int l = 0; l < kUnit; ++l) code[l] = block.code[u / 4 * 32 + l] >> (u % 4 * 2) & 3;
    put_bits(code, 0, 2, planes[0] + 8 * u);
  }
  write(planes[1], block.scale_min);
  write(planes[2], block.d, block.dmin);
}

void split_q3_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q3KBlock>(from);
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
  const auto block = read_as<layout::Q4KBlock>(from);
  put_paired_nibbles(block.code, planes[0]);
  write(planes[1], block.d, block.dmin, block.scale_min);
}

void split_q5_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q5KBlock>(from);
  put_paired_nibbles(block.low, planes[0]);
  for (int u = 0; u < 8; ++u) {
    uint8_t code[kUnit];
    for (int l = 0; l < kUnit; ++l) code[l] = block.high[l] >> u & 1;
    put_bits(code, 0, 1, planes[1] + 4 * u);
  }
  write(planes[2], block.d, block.dmin, block.scale_min);
}

void split_q6_K(const std::byte* from, std::byte* const* planes) {
  const auto block = read_as<layout::Q6KBlock>(from);
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

/// Grouped rows: planes of codes, masks in kMaskPlane; scales and zeros follow in kGroupPlane.
constexpr RowForm kGroupedForms[] = {
    {Id::gq2, {{8, 32}}, nullptr},
    {Id::gq3, {{8, 32}, {4, 32}}, nullptr},
    {Id::gq4, {{16, 32}}, nullptr},
    {Id::gq8, {{16, 32}, {16, 32}}, nullptr},
    {Id::nm24_q4, {{16, 32}}, nullptr},
    {Id::bm2, {{8, 32}, {}, {4, 32}}, nullptr},
    {Id::bm3, {{8, 32}, {4, 32}, {4, 32}}, nullptr},
    {Id::bm4, {{16, 32}, {}, {4, 32}}, nullptr},
    {Id::bm8, {{16, 32}, {16, 32}, {4, 32}}, nullptr},
    {Id::bm16, {{64, 32}}, nullptr},  // the weights themselves
};

const RowForm* grouped_form(const layout::Layout& layout) {
  for (const RowForm& form : kGroupedForms)
    if (form.id == layout.id) return &form;
  return nullptr;
}

/// Inputs that share scale and zero: at most K.
int64_t group_size_of(const layout::Layout& layout, int64_t K, layout::Params params) {
  if (layout.bits == 16) return K;
  return layout.id == Id::nm24_q4 ? layout::Nm24Q4Block::kCols : layout::whole_group(K, params.group_size);
}

/// The kernels find a group by a multiplication in 64 bits.
constexpr int64_t kMostGroupedInputs = int64_t{1} << 18;

/// A row: its columns go on with zeros up to a whole unit.
struct GroupedRow {
  std::vector<uint8_t> code;
  std::vector<uint32_t> mask;  // of each unit
  std::vector<f16> values;     // bm16
  std::vector<float> scale, zero;
};

/// Reads rows of one matrix.
class GroupedReader {
 public:
  GroupedReader(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                std::span<const std::byte> bytes)
      : layout_(layout), shape_(shape), params_(params), bytes_(bytes), g_(group_size_of(layout, shape.K, params)) {
    if (layout.family == layout::Family::bitmask) map_.emplace(layout, shape, params);
  }

  void read(int64_t n, GroupedRow& row) const {
    const auto columns = size_t((shape_.K + kUnit - 1) / kUnit * kUnit), groups = size_t((shape_.K + g_ - 1) / g_);
    row.code.assign(columns, 0);
    row.mask.assign(columns / kUnit, 0);
    row.values.assign(layout_.bits == 16 ? columns : 0, f16{});
    row.scale.resize(groups);
    row.zero.resize(groups);
    if (map_)
      read_bitmask(n, row);
    else if (layout_.id == Id::nm24_q4)
      read_two_of_four(n, row);
    else
      layout::read_gq_row(layout_.bits, bytes_.subspan(size_t(n * row_bytes()), size_t(row_bytes())),
                          std::span(row.code).first(size_t(shape_.K)), row.scale, row.zero);
  }

 private:
  int64_t row_bytes() const { return int64_t(bytes_.size()) / shape_.N; }

  void read_two_of_four(int64_t n, GroupedRow& row) const {
    constexpr uint8_t kNothing = 8;  // scale (8 - 8) is 0
    std::fill_n(row.code.begin(), shape_.K, kNothing);
    const std::byte* from = bytes_.data() + n * row_bytes();
    for (size_t b = 0; b < row.scale.size(); ++b, from += sizeof(layout::Nm24Q4Block)) {
      const auto block = read_as<layout::Nm24Q4Block>(from);
      row.scale[b] = to_float(block.scale);
      row.zero[b] = kNothing;
      for (size_t i = 0; i < size_t(layout::Nm24Q4Block::kKept); ++i) {
        const size_t place = i / 2 * 4 + (block.index[i / 4] >> (i % 4 * 2) & 3);
        row.code[b * size_t(layout::Nm24Q4Block::kCols) + place] = block.code[i / 2] >> (i % 2 * 4) & 15;
      }
    }
  }

  void read_bitmask(int64_t n, GroupedRow& row) const {
    const layout::BitmaskRow kept = layout::bitmask_row(*map_, shape_, params_, bytes_, n);
    int64_t at = 0;
    for (int64_t k = 0; k < shape_.K; ++k) {
      if ((uint8_t(kept.mask[k / 8]) >> (k % 8) & 1) == 0) continue;
      row.mask[size_t(k / kUnit)] |= 1u << (k % kUnit);
      if (layout_.bits == 16)
        row.values[size_t(k)] = read_as<f16>(kept.code + 2 * at);
      else
        row.code[size_t(k)] = layout::code_at(layout_.bits, kept.code, at);
      ++at;
    }
    for (size_t i = 0; layout_.bits < 16 && i < row.scale.size(); ++i) {
      const int64_t entry = 2 * (n * map_->groups + int64_t(i));
      row.scale[i] = to_float(read_as<f16>(bytes_.data() + map_->scale + entry));
      row.zero[i] = to_float(read_as<f16>(bytes_.data() + map_->zero + entry));
    }
  }

  const layout::Layout& layout_;
  layout::Shape shape_;
  layout::Params params_;
  std::span<const std::byte> bytes_;
  int64_t g_;
  std::optional<layout::BitmaskMap> map_;
};

void write_grouped_row(const layout::Layout& layout, const RowPlaces& places, const GroupedRow& row, std::byte* to) {
  if (layout.bits == 16) {
    std::memcpy(to, row.values.data(), row.values.size() * sizeof(f16));
    return;
  }
  if (layout.family == layout::Family::bitmask)
    std::memcpy(to + places.plane[kMaskPlane], row.mask.data(), row.mask.size() * sizeof(uint32_t));
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
  throw Error("--device cuda: no kernel reads rows of {}; those that one reads: {}, gq, bm and nm24_q4", layout.name,
              layout::known_row_names());
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
  if (layout.bits < 16) places.row_bytes = places.plane[kGroupPlane] + ((K + g - 1) / g * 4 + 15) / 16 * 16;
  if (g < K) places.group_factor = uint32_t(((int64_t{1} << 31) + g / 16 - 1) / (g / 16));
  return places;
}

void prepare_rows(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                  std::span<const std::byte> bytes, ThreadPool& pool, std::byte* out) {
  const RowForm& form = row_form(layout);
  const RowPlaces places = row_places(layout, shape.K, params);
  if (grouped_form(layout) != nullptr) {
    const GroupedReader reader(layout, shape, params, bytes);
    pool.parallel_for(shape.N, 16, [&](int64_t begin, int64_t end) {
      GroupedRow row;
      for (int64_t n = begin; n < end; ++n) {
        reader.read(n, row);
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
