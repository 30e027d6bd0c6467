#include "kernels/cuda/units_form.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "layout/gs.h"
#include "layout/octet.h"

namespace lacuna::cuda {
namespace {

int64_t place_count(int64_t K) { return (K + kUnit - 1) / kUnit; }

/// A unit of a row: its place, its group among the kept ones of the matrix, and which 16 inputs of that.
struct Unit {
  int64_t place, kept, part;
};

std::vector<Unit> units_of(const kernels::WeightView& view, const layout::GroupSparseMap& map, int64_t n) {
  const layout::GroupSparseRow row = layout::group_sparse_row(map, view.shape, view.params, view.bytes, n);
  std::vector<Unit> out;
  int64_t kept = row.first;
  for (int64_t i = 0; i < map.groups; ++i) {
    if (!layout::is_kept_group(row.mask, i)) continue;
    for (int64_t part = 0; part < map.group / kUnit; ++part)
      if (const int64_t place = i * map.group / kUnit + part; place < place_count(view.shape.K))
        out.push_back({place, kept, part});
    ++kept;
  }
  return out;
}

/// The rows of a panel of one part, those with most units first.
struct Row {
  int64_t n;  // of the part
  std::vector<Unit> units;
};
std::vector<Row> rows_of(const kernels::WeightView& view, const layout::GroupSparseMap& map, int64_t panel) {
  std::vector<Row> out;
  const int64_t first = panel * kPanelRows, end = std::min(view.shape.N, first + kPanelRows);
  for (int64_t n = first; n < end; ++n) out.push_back({n, units_of(view, map, n)});
  std::stable_sort(out.begin(), out.end(), [](const Row& a, const Row& b) { return a.units.size() > b.units.size(); });
  return out;
}

int64_t records_of(const Row& longest) {
  return std::max<int64_t>(1, (int64_t(longest.units.size()) + kRecordUnits - 1) / kRecordUnits);
}

/// Units of a row by lane, at most `most` for each: those of its class, then what others have too many of.
std::array<std::vector<Unit>, kRowLanes> deal_units(const std::vector<Unit>& units, size_t most) {
  std::array<std::vector<Unit>, kRowLanes> lanes;
  std::vector<Unit> left;
  for (const Unit& unit : units) {
    std::vector<Unit>& lane = lanes[size_t(unit.place % kRowLanes)];
    (lane.size() < most ? lane : left).push_back(unit);
  }
  for (std::vector<Unit>& lane : lanes)
    for (; lane.size() < most && !left.empty(); left.pop_back()) lane.push_back(left.back());
  return lanes;
}

/// Writes a unit of a lane of a record.
class UnitWriter {
 public:
  UnitWriter(const kernels::WeightView& view, const layout::GroupSparseMap& map)
      : view_(view), map_(map), form_(view.layout->bits) {}

  void put(std::byte* record, int lane, int which, const Unit& unit) const {
    const std::byte* const code = view_.bytes.data() + map_.code + unit.kept * map_.group_bytes;
    for (int k = 0; k < kUnit; ++k) {
      const int per_word = 32 / form_.width, word = k / per_word, in_word = k % per_word;
      const uint32_t value = layout::code_at(form_.bits, code, unit.part * kUnit + k);
      record[((lane * kLaneUnits + which) * form_.words + word) * 4 + in_word % 4] |=
          std::byte(value << (form_.width * (in_word / 4)));
    }
    std::memcpy(record + form_.scale_at + (lane * kLaneUnits + which) * 2,
                view_.bytes.data() + map_.scale + 2 * unit.kept, 2);
    const uint32_t zero = layout::code_at(form_.bits, view_.bytes.data() + map_.zero, unit.kept);
    put_index(record, lane, which, unit.place, zero);
  }
  void put_index(std::byte* record, int lane, int which, int64_t place, uint32_t zero) const {
    const auto index = uint16_t(uint32_t(place) | zero << 12);
    std::memcpy(record + form_.index_at + (lane * kLaneUnits + which) * 2, &index, 2);
  }

 private:
  const kernels::WeightView& view_;
  const layout::GroupSparseMap& map_;
  UnitForm form_;
};

/// Rows `first` to `first` + 3 of a panel's; those that are not there have outputs beyond the part's. outputs: before
/// the panel.
void write_quad(const UnitWriter& writer, const UnitForm& form, std::span<const Row> rows, int64_t outputs,
                int64_t first, int64_t records, int64_t places, std::byte* to) {
  for (int r = 0; r < kQuadRows; ++r) {
    std::array<std::vector<Unit>, kRowLanes> lanes;
    const bool is_there = size_t(r) < rows.size();
    if (is_there) lanes = deal_units(rows[size_t(r)].units, size_t(records * kLaneUnits));
    const int64_t row = is_there ? rows[size_t(r)].n % kPanelRows : first + r;
    for (int64_t i = 0; i < records; ++i) {
      const uint32_t output = uint32_t(outputs + row) | (i == 0 ? kQuadBegins : 0) | (i + 1 == records ? kQuadEnds : 0);
      std::memcpy(to + i * form.bytes + form.output_at + 4 * r, &output, 4);
    }
    for (int j = 0; j < kRowLanes; ++j)
      for (int64_t i = 0; i < records * kLaneUnits; ++i) {
        std::byte* const record = to + i / kLaneUnits * form.bytes;
        const int lane = r * kRowLanes + j, which = int(i % kLaneUnits);
        if (size_t(i) < lanes[size_t(j)].size())
          writer.put(record, lane, which, lanes[size_t(j)][size_t(i)]);
        else
          writer.put_index(record, lane, which, places, 0);
      }
  }
}

}  // namespace

bool has_units(const layout::Layout& layout, int64_t group, int64_t K) {
  return layout.family == layout::Family::group_sparse && layout.bits <= 4 && group % kUnit == 0 &&
         place_count(K) <= kMostPlaces;
}

int64_t most_unit_bytes(const kernels::WeightView& part) {
  const auto [N, K] = part.shape;
  const int64_t panels = (N + kPanelRows - 1) / kPanelRows, quads = (N + kQuadRows - 1) / kQuadRows + panels;
  const int64_t units = part.params.kept_groups * (part.params.group_size / kUnit);
  // A quad has the records of its longest row. Those of the following quad are no longer than its shortest.
  const int64_t records = units / (kRecordUnits * kQuadRows) + quads + panels * (place_count(K) / kRecordUnits + 1);
  return records * (UnitForm(part.layout->bits).bytes + 4) + quads * int64_t(sizeof(Quad)) + 4 * (panels + 1);
}

void prepare_units(std::span<const kernels::WeightView> parts, ThreadPool& pool, PreparedGroups& out) {
  const UnitForm form(out.layout->bits);
  const int64_t places = place_count(out.K);
  std::vector<layout::GroupSparseMap> maps;
  for (const kernels::WeightView& part : parts) maps.emplace_back(*part.layout, part.shape, part.params);
  const auto each_panel = [&](const auto& use) {
    for (size_t p = 0; p < parts.size(); ++p) {
      const int64_t first = out.first_output[p] / kPanelRows;
      pool.parallel_for((parts[p].shape.N + kPanelRows - 1) / kPanelRows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) use(p, first + panel, rows_of(parts[p], maps[p], panel));
      });
    }
  };
  std::vector<std::vector<Quad>> of_panel(static_cast<size_t>(out.panels));
  each_panel([&](size_t, int64_t panel, const std::vector<Row>& rows) {
    for (size_t r = 0; r < rows.size(); r += kQuadRows) {
      of_panel[size_t(panel)].push_back({0, uint32_t(records_of(rows[r]))});
    }
  });
  int64_t records = 0;
  out.start.assign(1, 0);
  for (std::vector<Quad>& quads : of_panel) {
    for (Quad& quad : quads) {
      const int64_t count = quad.end;
      if (records + count >= int64_t{1} << 31)
        throw Error("{}: {} units are too many for one launch", parts[0].name, records * kRecordUnits * kQuadRows);
      quad.first = uint32_t(records), quad.end = uint32_t(records + count);
      out.quad_of.insert(out.quad_of.end(), size_t(count), uint32_t(out.quads.size()));
      out.quads.push_back(quad);
      records += count;
    }
    out.start.push_back(uint32_t(out.quads.size()));
  }
  out.chunks = HugeBuffer(size_t(records) * size_t(form.bytes));
  each_panel([&](size_t p, int64_t panel, const std::vector<Row>& rows) {
    const UnitWriter writer(parts[p], maps[p]);
    for (size_t r = 0; r < rows.size(); r += kQuadRows) {
      const Quad& quad = out.quads[out.start[size_t(panel)] + r / kQuadRows];
      write_quad(writer, form, std::span(rows).subspan(r, std::min<size_t>(kQuadRows, rows.size() - r)),
                 panel * kPanelRows, int64_t(r), quad.end - quad.first, places,
                 out.chunks.data() + int64_t{quad.first} * form.bytes);
    }
  });
}

}  // namespace lacuna::cuda
