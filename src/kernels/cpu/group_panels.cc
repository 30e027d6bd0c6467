#include "kernels/cpu/group_panels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "layout/gs.h"
#include "layout/octet.h"

namespace lacuna::cpu {
namespace {

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
int64_t panel_count(const Problem& p) { return (p.shape.N + kGroupPanelRows - 1) / kGroupPanelRows; }
layout::GroupSparseMap map_of(const Problem& p) { return {layout::get(p.layout), p.shape, p.params}; }

/// Kept groups at every place of a panel.
std::vector<uint8_t> count_kept(const Problem& p, const layout::GroupSparseMap& map, int64_t panel) {
  const int64_t first = panel * kGroupPanelRows, end = std::min(p.shape.N, first + kGroupPanelRows);
  std::vector<uint8_t> kept(size_t(map.groups), 0);
  for (int64_t n = first; n < end; ++n) {
    const std::byte* mask = p.bytes.data() + map.mask + n * map.mask_row;
    for (int64_t i = 0; i < map.groups; ++i) kept[size_t(i)] += uint8_t(layout::is_kept_group(mask, i));
  }
  return kept;
}

/// Calls use(panel, where it begins) and returns the size of all.
template <class Form, class Use>
int64_t each_panel(const Problem& p, const Use& use) {
  const layout::GroupSparseMap map = map_of(p);
  int64_t at = round_up(8 * panel_count(p), 64);
  for (int64_t panel = 0; panel < panel_count(p); ++panel) {
    use(panel, at);
    at += map.groups * kGroupPanelMask;
    for (const uint8_t kept : count_kept(p, map, panel)) at += Form::place_bytes(kept);
    at = round_up(at, 64);
  }
  return at + kGroupPanelSlack;
}

void or_byte(std::byte* at, uint32_t bits) { *at |= std::byte(bits); }

}  // namespace

template <int kBits, int64_t kGroup>
int64_t group_panels_bytes(const Problem& p) {
  return each_panel<GroupPanelForm<kBits, kGroup>>(p, [](int64_t, int64_t) {});
}

template <int kBits, int64_t kGroup>
void place_group_panels(const Problem& p, std::byte* prepared) {
  each_panel<GroupPanelForm<kBits, kGroup>>(
      p, [&](int64_t panel, int64_t at) { std::memcpy(prepared + 8 * panel, &at, sizeof(at)); });
}

template <int kBits, int64_t kGroup>
void prepare_group_panels(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  using Form = GroupPanelForm<kBits, kGroup>;
  constexpr int kShifts = 8 / Form::kWidth;
  const layout::GroupSparseMap map = map_of(p);
  for (int64_t n = round_up(row0, kGroupPanelRows); n < row1; n += kGroupPanelRows) {
    const int64_t rows = std::min(kGroupPanelRows, p.shape.N - n);
    int64_t at;
    std::memcpy(&at, prepared + n / kGroupPanelRows * 8, sizeof(at));
    std::byte *masks = prepared + at, *place = masks + map.groups * kGroupPanelMask;
    const std::vector<uint8_t> counts = count_kept(p, map, n / kGroupPanelRows);
    int64_t next[kGroupPanelRows];  // kept group of each row
    for (int64_t r = 0; r < rows; ++r) next[r] = layout::group_sparse_row(map, p.shape, p.params, p.bytes, n + r).first;
    for (int64_t i = 0; i < map.groups; ++i, masks += kGroupPanelMask) {
      const int64_t kept = counts[size_t(i)];
      int64_t k = 0;
      for (int64_t r = 0; r < rows; ++r) {
        if (!layout::is_kept_group(p.bytes.data() + map.mask + (n + r) * map.mask_row, i)) continue;
        or_byte(masks + r / 8, 1u << (r % 8));
        const int64_t j = next[r]++, first = k / 16 * 16, dwords = std::min<int64_t>(16, kept - first);
        std::memcpy(place + 2 * k, p.bytes.data() + map.scale + 2 * j, 2);
        const uint32_t zero = layout::code_at(kBits, p.bytes.data() + map.zero, j);
        or_byte(place + Form::zeros_at(kept) + k * Form::kZeroBits / 8, zero << (k * Form::kZeroBits % 8));
        std::byte* lines = place + Form::codes_at(kept) + 4 * (first * Form::kLines + k - first);
        const std::byte* code = p.bytes.data() + map.code + j * map.group_bytes;
        for (int64_t c0 = 0; c0 < kGroup; c0 += layout::kOctet, code += kBits) {
          uint8_t octet[layout::kOctet];
          layout::read_octet(kBits, code, layout::kOctet, octet);
          for (int64_t c = c0; c < c0 + layout::kOctet; ++c) {
            const int64_t four = c / 4;
            or_byte(lines + four / kShifts * 4 * dwords + c % 4,
                    uint32_t{octet[c - c0]} << (Form::kWidth * (four % kShifts)));
          }
        }
        ++k;
      }
      place += Form::place_bytes(kept);
    }
  }
}

#define LACUNA_FORM(id, bits, group)                                         \
  template int64_t group_panels_bytes<bits, group>(const Problem&);          \
  template void place_group_panels<bits, group>(const Problem&, std::byte*); \
  template void prepare_group_panels<bits, group>(const Problem&, int64_t, int64_t, std::byte*);
LACUNA_EACH_GROUP_SPARSE(LACUNA_FORM)
#undef LACUNA_FORM

}  // namespace lacuna::cpu
