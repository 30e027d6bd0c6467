#include "kernels/cuda/groups_form.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/scalar.h"
#include "kernels/cuda/units_form.h"
#include "layout/gs.h"
#include "layout/octet.h"

namespace lacuna::cuda {
namespace {

/// The kernels keep x of one token in shared memory.
constexpr int64_t kMostInputs = 65536;

int64_t panel_count(int64_t N) { return (N + kPanelRows - 1) / kPanelRows; }

/// A part with the places of its sections.
struct Part {
  const kernels::WeightView& view;
  layout::GroupSparseMap map;

  explicit Part(const kernels::WeightView& weights) : view(weights), map(*view.layout, view.shape, view.params) {}
  const std::byte* bytes() const { return view.bytes.data(); }
};

/// Kept groups of a panel: [places] lists of {row in the panel, number in the matrix}, and how many there are.
struct Slot {
  int row;
  int64_t kept;
};
std::vector<std::vector<Slot>> slots_of(const Part& part, int64_t panel) {
  std::vector<std::vector<Slot>> places(size_t(part.map.groups));
  const int64_t first = panel * kPanelRows, end = std::min(part.view.shape.N, first + kPanelRows);
  for (int64_t n = first; n < end; ++n) {
    const layout::GroupSparseRow row =
        layout::group_sparse_row(part.map, part.view.shape, part.view.params, part.view.bytes, n);
    int64_t kept = row.first;
    for (int64_t i = 0; i < part.map.groups; ++i)
      if (layout::is_kept_group(row.mask, i)) places[size_t(i)].push_back({int(n - first), kept++});
  }
  return places;
}

/// A tile's places, and how many of its slots are of the first.
struct Tile {
  int64_t first = 0, second = 0;
  int split = kTileSlots;
};

/// Deals a panel's slots out to tiles: tile(t, Tile) after slot(t, s, Slot) for each of its slots. Returns how many
/// tiles there are: whole chunks, one at least.
template <class EachSlot, class EachTile>
int64_t deal_slots(const std::vector<std::vector<Slot>>& places, const EachSlot& slot, const EachTile& tile) {
  int64_t t = 0;
  int filled = 0;
  Tile now;
  const auto close = [&](int64_t next) {
    tile(t++, now);
    filled = 0;
    now = {next, next, kTileSlots};
  };
  for (int64_t i = 0; i < int64_t(places.size()); ++i) {
    for (const Slot& s : places[size_t(i)]) {
      const bool is_third = now.split < filled && i != now.second;
      if (filled == kTileSlots || (filled > 0 && i != now.second && (is_third || i - now.first > kMostStep))) close(i);
      if (filled == 0) now = {i, i, kTileSlots};
      if (i != now.second) now.second = i, now.split = filled;
      slot(t, filled++, s);
    }
  }
  while (filled > 0 || t == 0 || t % kChunkTiles != 0) close(now.second);
  return t;
}

int64_t chunk_count(const std::vector<std::vector<Slot>>& places) {
  return deal_slots(
             places, [](int64_t, int, const Slot&) {}, [](int64_t, const Tile&) {}) /
         kChunkTiles;
}

void or_bits(std::byte* at, uint32_t bits) { *at |= std::byte(bits); }

/// Writes slot `s` (0..15) of tile `t` (0..7) of a chunk: the kept group `from` of the part.
class ChunkWriter {
 public:
  ChunkWriter(const Part& part, const GroupForm& form, std::byte* chunk) : part_(part), form_(form), chunk_(chunk) {}

  void put_places(int t, const Tile& tile) const {
    const auto value = uint32_t(tile.first | (tile.second - tile.first) << 16 | int64_t{tile.split} << 27);
    std::memcpy(chunk_ + form_.place_at + t % 4 * 8 + t / 4 * 4, &value, sizeof(value));
  }

  void put(int t, int s, const Slot& slot) const {
    const layout::GroupSparseMap& map = part_.map;
    const int order = s % 8 * 16 + t % 4 * 4 + t / 4 * 2 + s / 8;  // 4 lane + which of its four
    chunk_[form_.row_at + order] = std::byte(slot.row);
    const std::byte* code = part_.bytes() + map.code + slot.kept * map.group_bytes;
    if (!form_.coded) {
      for (int k = 0; k < form_.group; ++k) std::memcpy(half_at(t, s, k), code + 2 * k, 2);
      return;
    }
    std::memcpy(chunk_ + form_.scale_at + 2 * order, part_.bytes() + map.scale + 2 * slot.kept, 2);
    const uint32_t zero = layout::code_at(form_.bits, part_.bytes() + map.zero, slot.kept);
    const int bit = order * form_.width;
    or_bits(chunk_ + form_.zero_at + bit / 8, zero << (bit % 8));
    for (int k = 0; k < form_.group; ++k) {
      const int step = k / 8 % form_.half + t * form_.half;  // half-step of the piece
      std::byte* word = word_at(k / 8 / form_.half, step / form_.positions, s % 8 * 4 + k % 8 / 2);
      or_bits(word + k % 2 * 2 + s / 8,
              uint32_t{layout::code_at(form_.bits, code, k)} << (form_.width * (step % form_.positions)));
    }
  }

 private:
  std::byte* word_at(int piece, int word, int lane) const {
    const int together = form_.together();
    const int at = ((piece * form_.words + word / together * together) * 32 + lane * together) + word % together;
    return chunk_ + 4 * at;
  }
  std::byte* half_at(int t, int s, int k) const {
    const int step = k / 8 % form_.half + t * form_.half;
    return word_at(k / 8 / form_.half, 2 * step + s / 8, s % 8 * 4 + k % 8 / 2) + k % 2 * 2;
  }

  const Part& part_;
  const GroupForm& form_;
  std::byte* chunk_;
};

void write_panel(const Part& part, const GroupForm& form, const std::vector<std::vector<Slot>>& places,
                 std::byte* chunks) {
  const auto chunk_of = [&](int64_t tile) { return ChunkWriter(part, form, chunks + tile / kChunkTiles * form.bytes); };
  deal_slots(
      places, [&](int64_t tile, int s, const Slot& slot) { chunk_of(tile).put(int(tile % kChunkTiles), s, slot); },
      [&](int64_t tile, const Tile& of) { chunk_of(tile).put_places(int(tile % kChunkTiles), of); });
}

/// The power of two that brings `largest` to [2^14, 2^15): as the kernels choose it of other layouts.
float operand_scale(float largest) {
  if (!std::isfinite(largest) || largest == 0) return 1;
  return std::ldexp(1.0f, std::max(std::ilogb(largest), -100) - 14);
}

/// What the weights of a panel's rows come to.
void measure_panel(const Part& part, int64_t panel, float* scale, float& bound) {
  const auto [N, K] = part.view.shape;
  const int64_t first = panel * kPanelRows, rows = std::min<int64_t>(kPanelRows, N - first);
  std::vector<float> w(static_cast<size_t>(K));
  double most = 0;
  for (int64_t r = 0; r < rows; ++r) {
    layout::decode_rows(*part.view.layout, part.view.shape, part.view.bytes, first + r, 1, w.data(), part.view.params);
    double sum = 0;
    float top = 0;
    for (const float v : w) {
      sum += std::fabs(double(v));
      if (!(std::fabs(v) <= top)) top = std::fabs(v);
    }
    scale[r] = operand_scale(top);
    if (!(sum <= most)) most = sum;
  }
  bound = std::nextafter(float(most), INFINITY);
  if (most == 0) bound = 0;
}

}  // namespace

bool is_group_layout(const layout::Layout& layout) { return layout.family == layout::Family::group_sparse; }

int64_t PreparedGroups::bytes() const {
  return int64_t(chunks.size() + 4 * (start.size() + bound.size() + quad_of.size()) + sizeof(Quad) * quads.size());
}

int64_t most_group_bytes(const kernels::WeightView& part) {
  if (has_units(*part.layout, part.params.group_size, part.shape.K)) return most_unit_bytes(part);
  const GroupForm form(part.layout->bits, int(part.params.group_size));
  const int64_t panels = panel_count(part.shape.N);
  const int64_t groups = (part.shape.K + part.params.group_size - 1) / part.params.group_size;
  // A tile that is not full ends two places, or one before a long step; the last chunk of a panel may hold one slot.
  const int64_t broken = panels * (groups / 2 + groups / kMostStep + 1);
  const int64_t tiles = std::min(part.params.kept_groups / kTileSlots + broken, part.params.kept_groups);
  return (tiles / kChunkTiles + panels) * form.bytes + 8 * (panels + 1);
}

PreparedGroups prepare_groups(std::span<const kernels::WeightView> parts, ThreadPool& pool,
                              std::optional<GroupsForm> form) {
  PreparedGroups out;
  out.K = kernels::check_weights(parts);
  out.layout = parts[0].layout;
  out.group = parts[0].params.group_size;
  if (out.K > kMostInputs)
    throw Error("{}: K = {}, but the CUDA kernels of {} take at most {} inputs", parts[0].name, out.K, out.layout->name,
                kMostInputs);
  std::vector<Part> sources;
  for (const kernels::WeightView& part : parts) {
    if (part.layout != out.layout || part.params.group_size != out.group)
      throw Error(
          "{}: is {} with groups of {}, but {} is {} with groups of {}; weights that one launch reads must have "
          "one layout",
          part.name, part.layout->name, part.params.group_size, parts[0].name, out.layout->name, out.group);
    sources.emplace_back(part);
    out.first_output.push_back(out.panels * kPanelRows);
    out.panels += panel_count(part.shape.N);
  }
  const bool units_fit = has_units(*out.layout, out.group, out.K);
  if (form == GroupsForm::units && !units_fit)
    throw Error("{}: {} with groups of {} and {} inputs cannot be prepared as units", parts[0].name, out.layout->name,
                out.group, out.K);
  const bool as_units = form.value_or(units_fit ? GroupsForm::units : GroupsForm::chunks) == GroupsForm::units;
  const GroupForm chunk(out.layout->bits, int(out.group));
  const auto each_panel = [&](const auto& use) {
    for (size_t p = 0; p < sources.size(); ++p) {
      const int64_t first = out.first_output[p] / kPanelRows;
      pool.parallel_for(panel_count(parts[p].shape.N), 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) use(sources[p], panel, first + panel);
      });
    }
  };
  std::vector<int64_t> count(size_t(out.panels));
  out.bound.resize(count.size());
  out.scale.assign(size_t(out.panels * kPanelRows), 1);
  each_panel([&](const Part& part, int64_t panel, int64_t at) {
    if (!as_units) count[size_t(at)] = chunk_count(slots_of(part, panel));
    measure_panel(part, panel, &out.scale[size_t(at * kPanelRows)], out.bound[size_t(at)]);
  });
  if (as_units) {
    out.bound.clear();
    prepare_units(parts, pool, out);
    return out;
  }
  int64_t chunks = 0;
  out.start.push_back(0);
  for (const int64_t n : count) {
    chunks += n;
    if (chunks >= int64_t{1} << 31)
      throw Error("{}: {} groups are too many for one launch", parts[0].name, chunks * kChunkSlots);
    out.start.push_back(uint32_t(chunks));
  }
  out.chunks = HugeBuffer(size_t(chunks) * size_t(chunk.bytes));
  each_panel([&](const Part& part, int64_t panel, int64_t at) {
    write_panel(part, chunk, slots_of(part, panel), out.chunks.data() + int64_t{out.start[size_t(at)]} * chunk.bytes);
  });
  return out;
}

}  // namespace lacuna::cuda
