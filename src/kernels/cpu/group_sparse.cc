#include "kernels/cpu/group_sparse.h"

#include <cstring>

#include "layout/gs.h"
#include "layout/octet.h"

namespace lacuna::cpu {
namespace {

layout::GroupSparseMap map_of(const Problem& p) { return {layout::get(p.layout), p.shape, p.params}; }

/// Kept groups before a row.
int64_t row_start(const Problem& p, int64_t n) {
  uint32_t start;
  std::memcpy(&start, p.bytes.data() + 4 * n, sizeof(start));
  return start;
}

void or_byte(std::byte* at, uint32_t bits) { *at |= std::byte(bits); }

}  // namespace

GroupValues group_values(const kernels::WeightView& view) {
  const layout::GroupSparseMap map(*view.layout, view.shape, view.params);
  return {view.bytes.data() + map.mask, view.bytes.data() + map.code, map.group, map.mask_row};
}

bool fits_group_sparse(const Problem& p) {
  return p.prepare == kernels::Prepare::automatic && p.shape.K > 0 && p.shape.K % kBlock == 0 &&
         p.shape.K <= kGroupSparseCols;
}

int64_t group_sparse_work(const Problem& p, int64_t row) { return 8 * row_start(p, row) + 16 * row; }

template <int kBits, int64_t kGroup>
int64_t group_sparse_prepared_bytes(const Problem& p) {
  using Form = GroupSparseForm<kBits, kGroup>;
  int64_t bytes = Form::rows_at(p.shape.N) + kGroupSparseSlack;
  for (int64_t n = 0; n < p.shape.N; ++n) bytes += Form::row_bytes(p.shape.K, row_start(p, n + 1) - row_start(p, n));
  return bytes;
}

template <int kBits, int64_t kGroup>
void place_group_sparse(const Problem& p, std::byte* prepared) {
  using Form = GroupSparseForm<kBits, kGroup>;
  int64_t at = Form::rows_at(p.shape.N);
  for (int64_t n = 0; n <= p.shape.N; ++n) {
    std::memcpy(prepared + 8 * n, &at, sizeof(at));
    if (n < p.shape.N) at += Form::row_bytes(p.shape.K, row_start(p, n + 1) - row_start(p, n));
  }
}

template <int kBits, int64_t kGroup>
void prepare_group_sparse(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  using Form = GroupSparseForm<kBits, kGroup>;
  const layout::GroupSparseMap map = map_of(p);
  const int64_t K = p.shape.K;
  for (int64_t n = row0; n < row1; ++n) {
    const layout::GroupSparseRow row = layout::group_sparse_row(map, p.shape, p.params, p.bytes, n);
    int64_t at;
    std::memcpy(&at, prepared + 8 * n, sizeof(at));
    std::byte* out = prepared + at;
    std::memcpy(out, row.mask, size_t(map.mask_row));
    std::memcpy(out + Form::scales_at(K, row.kept), p.bytes.data() + map.scale + 2 * row.first, size_t(2 * row.kept));
    std::byte* zeros = out + Form::zeros_at(K);
    std::byte* codes = out + Form::codes_at(K, row.kept);
    for (int64_t j = 0; j < row.kept; ++j) {
      const uint32_t zero = layout::code_at(kBits, p.bytes.data() + map.zero, row.first + j);
      if (kBits == 8)
        zeros[j] = std::byte(zero);
      else
        or_byte(zeros + j / 2, zero << (4 * (j % 2)));
      const std::byte* group = p.bytes.data() + map.code + (row.first + j) * map.group_bytes;
      for (int64_t i = 0; i < kGroup; ++i) {
        const uint32_t code = layout::code_at(kBits, group, i);
        const int64_t unit = j * Form::kUnits + i / Form::kUnit, q = unit % Form::kChunk;
        std::byte* byte = codes + unit / Form::kChunk * Form::kChunkBytes + i % Form::kUnit;
        if constexpr (kBits == 3) {
          or_byte(byte + q / 4 * Form::kUnit, (code & 3) << (2 * (q % 4)));
          or_byte(byte + 2 * Form::kUnit, code >> 2 << q);
        } else {
          or_byte(byte, code << (kBits * q));
        }
      }
    }
  }
}

#define LACUNA_FORM(id, bits, group)                                         \
  template int64_t group_sparse_prepared_bytes<bits, group>(const Problem&); \
  template void place_group_sparse<bits, group>(const Problem&, std::byte*); \
  template void prepare_group_sparse<bits, group>(const Problem&, int64_t, int64_t, std::byte*);
LACUNA_EACH_GROUP_SPARSE(LACUNA_FORM)
#undef LACUNA_FORM

}  // namespace lacuna::cpu
