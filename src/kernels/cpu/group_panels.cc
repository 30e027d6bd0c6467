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

/// Sixteens of kept groups at every place of a panel, of all places together.
int64_t count_sixteens(const Problem& p, const layout::GroupSparseMap& map, int64_t panel) {
  const int64_t first = panel * kGroupPanelRows, end = std::min(p.shape.N, first + kGroupPanelRows);
  std::vector<uint16_t> kept(size_t(map.groups), 0);
  for (int64_t n = first; n < end; ++n) {
    const std::byte* mask = p.bytes.data() + map.mask + n * map.mask_row;
    for (int64_t i = 0; i < map.groups; ++i) kept[size_t(i)] += uint16_t(layout::is_kept_group(mask, i));
  }
  int64_t sixteens = 0;
  for (const int64_t count : kept) sixteens += (count + 15) / 16;
  return sixteens;
}

/// Calls use(panel, heads' place, lines' place) and returns the size of all.
template <class Form, class Use>
int64_t each_panel(const Problem& p, const Use& use) {
  const layout::GroupSparseMap map = map_of(p);
  int64_t at = round_up(16 * panel_count(p), 64);
  for (int64_t panel = 0; panel < panel_count(p); ++panel) {
    const int64_t sixteens = count_sixteens(p, map, panel);
    const int64_t lines = at + round_up(map.groups * kGroupPanelMasks + sixteens * kGroupPanelHead, 64);
    use(panel, at, lines);
    at = lines + sixteens * Form::kLines * 64;
  }
  return at;
}

}  // namespace

template <int kBits, int64_t kGroup>
int64_t group_panels_bytes(const Problem& p) {
  return each_panel<GroupPanelForm<kBits, kGroup>>(p, [](int64_t, int64_t, int64_t) {});
}

template <int kBits, int64_t kGroup>
void place_group_panels(const Problem& p, std::byte* prepared) {
  each_panel<GroupPanelForm<kBits, kGroup>>(p, [&](int64_t panel, int64_t heads, int64_t lines) {
    const int64_t at[] = {heads, lines};
    std::memcpy(prepared + 16 * panel, at, sizeof(at));
  });
}

template <int kBits, int64_t kGroup>
void prepare_group_panels(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  using Form = GroupPanelForm<kBits, kGroup>;
  const layout::GroupSparseMap map = map_of(p);
  for (int64_t n = round_up(row0, kGroupPanelRows); n < row1; n += kGroupPanelRows) {
    const int64_t rows = std::min(kGroupPanelRows, p.shape.N - n);
    int64_t at[2];
    std::memcpy(at, prepared + n / kGroupPanelRows * 16, sizeof(at));
    std::byte *head = prepared + at[0], *lines = prepared + at[1];
    int64_t next[kGroupPanelRows];  // kept group of each row
    for (int64_t r = 0; r < rows; ++r) next[r] = layout::group_sparse_row(map, p.shape, p.params, p.bytes, n + r).first;
    for (int64_t i = 0; i < map.groups; ++i) {
      std::byte* masks = head;
      head += kGroupPanelMasks;
      int64_t kept = 0;
      for (int64_t r = 0; r < rows; ++r) {
        if (!layout::is_kept_group(p.bytes.data() + map.mask + (n + r) * map.mask_row, i)) continue;
        masks[r / 8] |= std::byte(1 << (r % 8));
        const int64_t j = next[r]++, lane = kept % 16;
        std::byte* sixteen = head + kept / 16 * kGroupPanelHead;
        std::byte* line = lines + kept / 16 * Form::kLines * 64 + 4 * lane;
        ++kept;
        std::memcpy(sixteen + 2 * lane, p.bytes.data() + map.scale + 2 * j, 2);
        sixteen[32 + lane] = std::byte(layout::code_at(kBits, p.bytes.data() + map.zero, j));
        const std::byte* code = p.bytes.data() + map.code + j * map.group_bytes;
        for (int64_t k = 0; k < kGroup; k += layout::kOctet, code += kBits) {
          uint8_t octet[layout::kOctet];
          layout::read_octet(kBits, code, layout::kOctet, octet);
          for (int64_t c = k; c < k + layout::kOctet; ++c) {
            const int64_t four = c / 4;
            line[four / (8 / Form::kWidth) * 64 + c % 4] |=
                std::byte(uint32_t{octet[c - k]} << (Form::kWidth * (four % (8 / Form::kWidth))));
          }
        }
      }
      head += (kept + 15) / 16 * kGroupPanelHead;
      lines += (kept + 15) / 16 * Form::kLines * 64;
    }
  }
}

#define LACUNA_FORM(bits, group)                                             \
  template int64_t group_panels_bytes<bits, group>(const Problem&);          \
  template void place_group_panels<bits, group>(const Problem&, std::byte*); \
  template void prepare_group_panels<bits, group>(const Problem&, int64_t, int64_t, std::byte*);
#define LACUNA_FORMS(bits) \
  LACUNA_FORM(bits, 8) LACUNA_FORM(bits, 16) LACUNA_FORM(bits, 32) LACUNA_FORM(bits, 64) LACUNA_FORM(bits, 128)
LACUNA_FORMS(2)
LACUNA_FORMS(3)
LACUNA_FORMS(4)
LACUNA_FORMS(8)
#undef LACUNA_FORMS
#undef LACUNA_FORM

}  // namespace lacuna::cpu
