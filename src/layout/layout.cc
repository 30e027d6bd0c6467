#include "layout/layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/checked_math.h"
#include "core/error.h"
#include "layout/bm.h"
#include "layout/fallback.h"
#include "layout/float_rows.h"
#include "layout/gq.h"
#include "layout/gs.h"
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
#include "layout/tensor_core.h"
#include "layout/zigzag.h"

namespace lacuna::layout {

namespace {

void check_not_negative(Shape shape) {
  if (shape.N < 0 || shape.K < 0)
    throw Error("the shape is [{}, {}], but neither number may be negative; the file is damaged", shape.N, shape.K);
}

int64_t rows_size(const Layout& layout, Shape shape, Params) {
  if (shape.K % layout.block_cols != 0)
    throw Error("K = {}, but {} needs a multiple of {}; store it as {} instead", shape.K, layout.name,
                layout.block_cols, get(fitting_layout(layout.id, shape.K)).name);
  const auto row = checked_mul(shape.K / layout.block_cols, layout.block_bytes);
  const auto size = row ? checked_mul(*row, shape.N) : row;
  if (!size) throw Error("[{}, {}] in {} is more than 2^63 bytes; the file is damaged", shape.N, shape.K, layout.name);
  return *size;
}

int64_t zigzag_size(const Layout& layout, Shape shape, Params) {
  const auto row = checked_mul(shape.K, layout.block_bytes);
  const auto size = row ? checked_mul(*row, super_rows(shape.N)) : row;
  if (!size) throw Error("[{}, {}] in {} is more than 2^63 bytes; the file is damaged", shape.N, shape.K, layout.name);
  return *size;
}

void check_spans(const Layout& layout, std::span<const std::byte> row, std::span<const float> w) {
  assert(int64_t(w.size()) % layout.block_cols == 0);
  assert(int64_t(row.size()) == layout.row_bytes(int64_t(w.size())));
  (void)layout, (void)row, (void)w;
}

void check_importance(std::span<const float> w, std::span<const float> importance) {
  if (importance.empty()) return;
  if (importance.size() != w.size())
    throw Error("{} importances for a row of {} weights; give one for each input or none", importance.size(), w.size());
  for (size_t k = 0; k < importance.size(); ++k)
    if (!(importance[k] >= 0.0f && std::isfinite(importance[k])))
      throw Error("the importance of input {} is {}, but it must be a finite number >= 0; collect the statistics again",
                  k, importance[k]);
}

// Blocks may lie at any address, so each is copied out before it is used.
template <class Block>
Block load_block(std::span<const std::byte> bytes, size_t index) {
  Block block;
  std::memcpy(&block, bytes.data() + index * sizeof(Block), sizeof(Block));
  return block;
}

template <class Block>
void decode_row_of_blocks(const Layout& layout, std::span<const std::byte> row, std::span<float> w) {
  check_spans(layout, row, w);
  for (size_t b = 0; b < row.size() / sizeof(Block); ++b)
    decode_block(load_block<Block>(row, b), w.data() + b * size_t(Block::kCols));
}

template <class Block>
void encode_row_of_blocks(const Layout& layout, std::span<const float> w, std::span<const float> importance,
                          std::span<std::byte> out) {
  check_spans(layout, out, w);
  check_importance(w, importance);
  constexpr size_t kCols = size_t(Block::kCols), kChunk = 256;
  std::array<Block, kChunk / kCols> blocks;
  for (size_t k = 0; k < w.size(); k += kChunk) {
    const size_t cols = std::min(kChunk, w.size() - k);
    const std::span<Block> chunk = std::span(blocks).first(cols / kCols);
    encode_blocks(w.subspan(k, cols), importance.empty() ? importance : importance.subspan(k, cols), chunk);
    std::memcpy(out.data() + k / kCols * sizeof(Block), chunk.data(), chunk.size_bytes());
  }
}

bool is_finite(f16 h) { return (h.bits & 0x7c00u) != 0x7c00u; }

template <class Block>
bool has_finite_scales(const Block& block) {
  if constexpr (requires { block.dmin; })
    return is_finite(block.d) && is_finite(block.dmin);
  else if constexpr (requires { block.d; })
    return is_finite(block.d);
  else if constexpr (requires { block.min; })
    return is_finite(block.scale) && is_finite(block.min);
  else
    return is_finite(block.scale);
}

template <class Block>
int64_t first_bad_block_row(const Layout& layout, Shape shape, Params, std::span<const std::byte> bytes) {
  const size_t blocks = size_t(shape.K / layout.block_cols);
  for (size_t b = 0; b < bytes.size() / sizeof(Block); ++b)
    if (!has_finite_scales(load_block<Block>(bytes, b))) return int64_t(b / blocks);
  return -1;
}

template <void (*encode)(std::span<const float>, std::span<std::byte>)>
void encode_float_row(const Layout& layout, std::span<const float> w, std::span<const float> importance,
                      std::span<std::byte> out) {
  check_spans(layout, out, w);
  check_importance(w, importance);
  encode(w, out);
}

template <void (*decode)(std::span<const std::byte>, std::span<float>)>
void decode_float_row(const Layout& layout, std::span<const std::byte> row, std::span<float> w) {
  check_spans(layout, row, w);
  decode(row, w);
}

template <bool (*is_finite_row)(std::span<const std::byte>)>
int64_t first_bad_float_row(const Layout& layout, Shape shape, Params, std::span<const std::byte> bytes) {
  const size_t stride = size_t(layout.row_bytes(shape.K));
  for (int64_t n = 0; n < shape.N; ++n)
    if (!is_finite_row(bytes.subspan(size_t(n) * stride, stride))) return n;
  return -1;
}

void decode_rows_alone(const Layout& layout, Shape shape, Params, std::span<const std::byte> bytes, int64_t row0,
                       int64_t rows, float* out) {
  const size_t stride = size_t(layout.row_bytes(shape.K)), K = size_t(shape.K);
  for (int64_t n = 0; n < rows; ++n)
    layout.decode_row(layout, bytes.subspan(size_t(row0 + n) * stride, stride), {out + size_t(n) * K, K});
}

void decode_nm24(const Layout&, Shape shape, Params, std::span<const std::byte> bytes, int64_t row0, int64_t rows,
                 float* out) {
  const auto blocks = size_t(shape.K / Nm24Q4Block::kCols);
  for (size_t b = size_t(row0) * blocks; b < size_t(row0 + rows) * blocks; ++b, out += Nm24Q4Block::kCols)
    decode_block(load_block<Nm24Q4Block>(bytes, b), out);
}

int64_t first_bad_nm24_row(const Layout&, Shape shape, Params, std::span<const std::byte> bytes) {
  const auto blocks = size_t(shape.K / Nm24Q4Block::kCols);
  for (size_t b = 0; b < bytes.size() / sizeof(Nm24Q4Block); ++b) {
    const auto block = load_block<Nm24Q4Block>(bytes, b);
    if (!is_finite(block.scale) || !is_ascending(block)) return int64_t(b / blocks);
  }
  return -1;
}

template <class Block>
constexpr Layout block_layout(Id id, std::string_view name, int ggml_type) {
  return {.id = id,
          .name = name,
          .ggml_type = ggml_type,
          .block_cols = Block::kCols,
          .block_bytes = int64_t(sizeof(Block)),
          .size = rows_size,
          .encode_row = encode_row_of_blocks<Block>,
          .decode_row = decode_row_of_blocks<Block>,
          .decode = decode_rows_alone,
          .first_bad = first_bad_block_row<Block>};
}

template <void (*encode)(std::span<const float>, std::span<std::byte>),
          void (*decode)(std::span<const std::byte>, std::span<float>), bool (*finite)(std::span<const std::byte>)>
constexpr Layout float_layout(Id id, std::string_view name, int ggml_type, int64_t bytes) {
  return {.id = id,
          .name = name,
          .ggml_type = ggml_type,
          .block_cols = 1,
          .block_bytes = bytes,
          .size = rows_size,
          .encode_row = encode_float_row<encode>,
          .decode_row = decode_float_row<decode>,
          .decode = decode_rows_alone,
          .first_bad = first_bad_float_row<finite>};
}

constexpr Layout packed_layout(Id id, std::string_view name, Family family, Id row_id) {
  return {.id = id,
          .name = name,
          .ggml_type = -1,
          .block_cols = 1,
          .block_bytes = 0,
          .size = gq_size,
          .encode_row = nullptr,
          .decode_row = nullptr,
          .decode = decode_gq,
          .first_bad = first_bad_gq_row,
          .family = family,
          .zigzag = family == Family::zigzag,
          .row_id = row_id};
}

constexpr Layout zigzag_layout(Id id, std::string_view name, Id superblock, int64_t superblock_bytes) {
  Layout out = packed_layout(id, name, Family::zigzag, superblock);
  out.block_bytes = superblock_bytes;
  out.size = zigzag_size;
  out.decode = decode_zigzag;
  out.first_bad = first_bad_zigzag_output;
  return out;
}

constexpr Layout gq_layout(Id id, std::string_view name, int bits, Id row_id) {
  Layout out = packed_layout(id, name, Family::grouped, row_id);
  out.bits = bits;
  return out;
}

constexpr Layout bitmask_layout(Id id, std::string_view name, int bits, Id row_id) {
  Layout out = packed_layout(id, name, Family::bitmask, row_id);
  out.size = bitmask_size;
  out.decode = decode_bitmask;
  out.first_bad = first_bad_bitmask_row;
  out.bits = bits;
  return out;
}

constexpr Layout group_sparse_layout(Id id, std::string_view name, int bits, Id row_id) {
  Layout out = packed_layout(id, name, Family::group_sparse, row_id);
  out.size = group_sparse_size;
  out.decode = decode_group_sparse;
  out.first_bad = first_bad_group_sparse_row;
  out.bits = bits;
  return out;
}

constexpr Layout nm24_layout(Id id, std::string_view name, Id row_id) {
  Layout out = packed_layout(id, name, Family::two_of_four, row_id);
  out.block_cols = Nm24Q4Block::kCols;
  out.block_bytes = sizeof(Nm24Q4Block);
  out.size = rows_size;
  out.decode = decode_nm24;
  out.first_bad = first_bad_nm24_row;
  out.bits = 4;
  return out;
}

constexpr Layout tensor_core_layout(Id id, std::string_view name, Id row_id) {
  Layout out = packed_layout(id, name, Family::tensor_core, row_id);
  out.size = tensor_core_size;
  out.decode = decode_tensor_core;
  out.first_bad = first_bad_tensor_core_row;
  return out;
}

constexpr std::array kLayouts = {
    float_layout<encode_f32, decode_f32, is_finite_f32>(Id::f32, "f32", 0, 4),
    float_layout<encode_f16, decode_f16, is_finite_f16>(Id::f16, "f16", 1, 2),
    float_layout<encode_bf16, decode_bf16, is_finite_bf16>(Id::bf16, "bf16", 30, 2),
    block_layout<Q4_0Block>(Id::q4_0, "q4_0", 2),
    block_layout<Q4_1Block>(Id::q4_1, "q4_1", 3),
    block_layout<Q5_0Block>(Id::q5_0, "q5_0", 6),
    block_layout<Q5_1Block>(Id::q5_1, "q5_1", 7),
    block_layout<Q8_0Block>(Id::q8_0, "q8_0", 8),
    block_layout<Q2KBlock>(Id::q2_K, "q2_K", 10),
    block_layout<Q3KBlock>(Id::q3_K, "q3_K", 11),
    block_layout<Q4KBlock>(Id::q4_K, "q4_K", 12),
    block_layout<Q5KBlock>(Id::q5_K, "q5_K", 13),
    block_layout<Q6KBlock>(Id::q6_K, "q6_K", 14),
    zigzag_layout(Id::zz2_k, "zz2_k", Id::q2_K, sizeof(Q2KBlock)),
    zigzag_layout(Id::zz3_k, "zz3_k", Id::q3_K, sizeof(Q3KBlock)),
    zigzag_layout(Id::zz4_k, "zz4_k", Id::q4_K, sizeof(Q4KBlock)),
    zigzag_layout(Id::zz5_k, "zz5_k", Id::q5_K, sizeof(Q5KBlock)),
    zigzag_layout(Id::zz6_k, "zz6_k", Id::q6_K, sizeof(Q6KBlock)),
    zigzag_layout(Id::zz8, "zz8", Id::q8_0, 8 * sizeof(Q8_0Block)),
    gq_layout(Id::gq2, "gq2", 2, Id::q2_K),
    gq_layout(Id::gq3, "gq3", 3, Id::q3_K),
    gq_layout(Id::gq4, "gq4", 4, Id::q4_K),
    gq_layout(Id::gq8, "gq8", 8, Id::q8_0),
    bitmask_layout(Id::bm2, "bm2", 2, Id::q2_K),
    bitmask_layout(Id::bm3, "bm3", 3, Id::q3_K),
    bitmask_layout(Id::bm4, "bm4", 4, Id::q4_K),
    bitmask_layout(Id::bm8, "bm8", 8, Id::q8_0),
    bitmask_layout(Id::bm16, "bm16", 16, Id::f16),
    nm24_layout(Id::nm24_q4, "nm24_q4", Id::q4_K),
    group_sparse_layout(Id::gs2, "gs2", 2, Id::q2_K),
    group_sparse_layout(Id::gs3, "gs3", 3, Id::q3_K),
    group_sparse_layout(Id::gs4, "gs4", 4, Id::q4_K),
    group_sparse_layout(Id::gs8, "gs8", 8, Id::q8_0),
    group_sparse_layout(Id::gs16, "gs16", 16, Id::f16),
    tensor_core_layout(Id::f8, "f8", Id::q8_0),
    tensor_core_layout(Id::nm24_f8, "nm24_f8", Id::q8_0),
    tensor_core_layout(Id::nm24_bf16, "nm24_bf16", Id::bf16),
};
constexpr size_t kRowLayouts = size_t(Id::zz2_k);

static_assert(
    [] {
      for (size_t i = 0; i < kLayouts.size(); ++i)
        if (size_t(kLayouts[i].id) != i || (kLayouts[i].family == Family::rows) != (i < kRowLayouts)) return false;
      return true;
    }(),
    "the table is in the order of Id");

constexpr Parameter kTileRows{"tile_rows", &Params::tile_rows}, kGroupSize{"group_size", &Params::group_size},
    kOctets{"octets", &Params::octets}, kKeptGroups{"kept_groups", &Params::kept_groups};
constexpr std::array kZigzagParameters = {kTileRows}, kGroupedParameters = {kGroupSize}, kValueParameters = {kOctets};
constexpr std::array kBitmaskParameters = {kGroupSize, kOctets}, kGroupSparseParameters = {kGroupSize, kKeptGroups};
constexpr std::array kParameters = {kTileRows, kGroupSize, kOctets, kKeptGroups};

std::string joined_names(std::span<const Layout> layouts) {
  std::string list;
  for (const Layout& layout : layouts) list += (list.empty() ? "" : ", ") + std::string(layout.name);
  return list;
}

}  // namespace

std::span<const Layout> all() { return kLayouts; }
std::span<const Layout> row_layouts() { return all().first(kRowLayouts); }

const Layout& get(Id id) {
  assert(size_t(id) < kLayouts.size());
  return kLayouts[size_t(id)];
}

int64_t Layout::size_bytes(Shape shape, Params params) const {
  check_not_negative(shape);
  return size(*this, shape, params);
}

double Layout::bits_per_weight() const {
  constexpr double kScaleAndZero = 32.0 / 128;
  if (family == Family::grouped) return bits + kScaleAndZero;
  if (family == Family::bitmask) return 1 + bits + (bits < 16 ? kScaleAndZero : 0);
  if (family == Family::group_sparse) return bits + (bits < 16 ? (17.0 + bits) / 16 : 1.0 / 16);
  if (family == Family::tensor_core) {
    const TensorCoreRow eight = tensor_core_row(*this, 8);
    return double(eight.bytes - eight.index);
  }
  return 8.0 * double(block_bytes) / double(zigzag ? kSuperRows : block_cols);
}

const Layout& row_layout(const Layout& layout) { return layout.family == Family::rows ? layout : get(layout.row_id); }

std::span<const Parameter> parameters(const Layout& layout) {
  switch (layout.family) {
    case Family::zigzag:
      return kZigzagParameters;
    case Family::grouped:
      return kGroupedParameters;
    case Family::bitmask:
      return layout.bits < 16 ? std::span<const Parameter>(kBitmaskParameters) : kValueParameters;
    case Family::group_sparse:
      return kGroupSparseParameters;
    case Family::rows:
    case Family::two_of_four:
    case Family::tensor_core:
      break;
  }
  return {};
}

void check_params(const Layout& layout, Params params) {
  const std::span<const Parameter> own = parameters(layout);
  for (const Parameter& parameter : kParameters) {
    if (params.*parameter.value == 0 || std::ranges::find(own, parameter.name, &Parameter::name) != own.end()) continue;
    std::string owners;
    for (const Layout& other : all()) {
      const auto theirs = parameters(other);
      if (std::ranges::find(theirs, parameter.name, &Parameter::name) != theirs.end())
        owners += (owners.empty() ? "" : ", ") + std::string(other.name);
    }
    throw Error("{} has no {}; it is a parameter of {}", layout.name, parameter.name, owners);
  }
  if (layout.zigzag) check_zigzag_params(params);
  if (params.group_size < 0) throw Error("group_size is {}, but it must be 0 (whole rows) or more", params.group_size);
  if (params.octets < 0 || params.octets > int64_t{UINT32_MAX})
    throw Error("octets is {}, but it must lie between 0 and 2^32 - 1", params.octets);
  if (params.kept_groups < 0 || params.kept_groups > int64_t{UINT32_MAX})
    throw Error("kept_groups is {}, but it must lie between 0 and 2^32 - 1", params.kept_groups);
  if (layout.family == Family::group_sparse && !is_sparse_group(params.group_size))
    throw Error("group_size is {}, but {} has groups of 8, 16, 32, 64 or 128", params.group_size, layout.name);
  if (counts_kept(layout) ? params.nnz < 0 : params.nnz != 0)
    throw Error("nnz is {} in {}, which {}", params.nnz, layout.name,
                counts_kept(layout) ? "must be 0 or more" : "always keeps the same number of weights");
}

bool has_e4m3_codes(const Layout& layout) {
  return layout.family == Family::tensor_core && tensor_core_row(layout, 0).scaled;
}

bool counts_kept(const Layout& layout) {
  return layout.family == Family::bitmask || layout.family == Family::group_sparse;
}

int64_t kept_weights(const Layout& layout, Shape shape, Params params) {
  if (counts_kept(layout)) return params.nnz;
  if (layout.family == Family::tensor_core) return tensor_core_kept_weights(layout, shape);
  return layout.family == Family::two_of_four ? shape.N * shape.K / 2 : shape.N * shape.K;
}

const Layout* find(std::string_view name) {
  const auto it = std::ranges::find(kLayouts, name, &Layout::name);
  return it == kLayouts.end() ? nullptr : &*it;
}

const Layout* find_ggml_type(int type) {
  if (type < 0) return nullptr;
  const auto it = std::ranges::find(kLayouts, type, &Layout::ggml_type);
  return it == kLayouts.end() ? nullptr : &*it;
}

std::string_view known_names() {
  static const std::string names = joined_names(all());
  return names;
}

std::string_view known_row_names() {
  static const std::string names = joined_names(row_layouts());
  return names;
}

void project_row(const Layout& layout, std::span<float> w, std::span<const float> importance) {
  assert(layout.family == Family::rows);
  std::vector<std::byte> row(size_t(layout.size_bytes({1, int64_t(w.size())})));
  layout.encode_row(layout, w, importance, row);
  layout.decode_row(layout, row, w);
}

void decode_rows(const Layout& layout, Shape shape, std::span<const std::byte> bytes, int64_t row0, int64_t rows,
                 float* out, Params params) {
  assert(row0 >= 0 && rows >= 0 && row0 + rows <= shape.N);
  assert(int64_t(bytes.size()) == layout.size_bytes(shape, params));
  layout.decode(layout, shape, params, bytes, row0, rows, out);
}

int64_t first_bad_row(const Layout& layout, Shape shape, std::span<const std::byte> bytes, Params params) {
  assert(int64_t(bytes.size()) == layout.size_bytes(shape, params));
  return layout.first_bad(layout, shape, params, bytes);
}

void check_bytes(const Layout& layout, Shape shape, std::span<const std::byte> bytes, Params params) {
  const int64_t row = first_bad_row(layout, shape, bytes, params);
  if (row < 0) return;
  std::string_view what = "a scale that is not finite";
  if (layout.id == Id::f32 || layout.id == Id::f16 || layout.id == Id::bf16) what = "a value that is not finite";
  if (layout.family == Family::grouped) what = "a scale or zero that is not finite, or padding that is not zero";
  if (layout.family == Family::two_of_four) what = "a scale that is not finite, or positions that do not ascend";
  if (layout.family == Family::tensor_core)
    what = "a number that is not finite, positions that do not ascend, or padding that is not zero";
  if (counts_kept(layout))
    what = "a number that is not finite, a start that does not follow from the mask, or padding that is not zero";
  throw Error("row {} in {} has {}; the file is damaged", row, layout.name, what);
}

int64_t find_non_finite(std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000u;
  constexpr size_t kChunk = 4096;  // whole chunks are tested without a branch a value
  for (size_t begin = 0; begin < values.size(); begin += kChunk) {
    const std::span<const float> chunk = values.subspan(begin, std::min(kChunk, values.size() - begin));
    bool bad = false;
    for (const float value : chunk) bad |= (std::bit_cast<uint32_t>(value) & kExponent) == kExponent;
    if (!bad) continue;
    for (size_t i = 0; i < chunk.size(); ++i)
      if (!std::isfinite(chunk[i])) return int64_t(begin + i);
  }
  return -1;
}

}  // namespace lacuna::layout
