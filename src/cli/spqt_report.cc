#include "cli/spqt_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/svg.h"
#include "kernels/ops.h"

namespace lacuna::cli {
namespace {

/// What a part shows, and what its bars are.
struct PartText {
  const char* name;
  const char* title;
  enum class Bars : uint8_t { ms, speedup, relative } bars;
};
constexpr PartText kParts[] = {
    {"table2", "Table 2: decoding after a short prompt; speed-up over dense q4_K", PartText::Bars::ms},
    {"fig7", "Figure 7: all linear layers of one token; speed-up over dense q4_K", PartText::Bars::speedup},
    {"fig8", "Figure 8: one matrix times one token, latency; speed-up over dense q4_K", PartText::Bars::ms},
    {"fig9", "Figure 9: the same at 50% beside the baselines; speed-up over dense q4_K", PartText::Bars::speedup},
    {"fig10", "Figure 10: dense products, N x K; time relative to q4_K", PartText::Bars::relative},
};

const PartText& text_of(const std::string& part) {
  return *std::find_if(std::begin(kParts), std::end(kParts), [&](const PartText& text) { return text.name == part; });
}

template <class Value>
size_t place_of(std::vector<Value>& values, const Value& value) {
  const auto found = std::find(values.begin(), values.end(), value);
  if (found != values.end()) return size_t(found - values.begin());
  values.push_back(value);
  return values.size() - 1;
}

}  // namespace

void SpqtReport::add(const SpqtRow& row) {
  if (common_.json)
    print_json(json(row));
  else
    print_row(row);
  rows_.push_back(row);
}

void SpqtReport::print_row(const SpqtRow& row) {
  if (rows_.empty()) {
    const std::string where = machine_.gpu.empty() ? fmt::format("{} threads, {}, {:.2f} GHz", common_.threads,
                                                                 kernels::isa_name(), machine_.clock_ghz)
                                                   : machine_.gpu;
    print(fmt::format("{}, memory reads {:.1f} GB/s\n", where, machine_.ceiling_gb_s));
  }
  if (rows_.empty() || rows_.back().part != row.part)
    print(fmt::format("\n{}\n{:<14} {:>9} {:>21} {:>8} {:>6} {:>9} {:>9} {:>8} {:>14}\n", text_of(row.part).title, "",
                      "median ms", "min .. max ms", "GB/s", "of max", "of access", "GFLOP/s", "speed-up",
                      "min .. max"));
  if (rows_.empty() || rows_.back().part != row.part || rows_.back().group != row.group)
    print(fmt::format("{}\n", row.group));
  if (!row.note.empty()) {
    print(fmt::format("  {:<12} {}\n", row.variant, row.note));
    return;
  }
  const eval::BenchRow& r = row.row;
  print(fmt::format(
      "  {:<12} {:>9.3f} {:>9.3f} .. {:>8.3f} {:>8.2f} {:>5.0f}% {:>9} {:>9.1f} {:>7.2f}x {:>6.2f} .. {:.2f}\n",
      row.variant, r.median_ms, r.min_ms, r.max_ms, r.gb_s(), 100 * r.gb_s() / machine_.ceiling_gb_s,
      r.access_ceiling_gb_s ? fmt::format("{:.0f}%", 100 * r.gb_s() / *r.access_ceiling_gb_s) : "", row.gflops,
      row.speedup.median, row.speedup.min, row.speedup.max));
}

Json SpqtReport::json(const SpqtRow& row) const {
  Json out = {{"bench", "spqt"}, {"part", row.part}, {"shape", row.group}, {"variant", row.variant}};
  if (!row.note.empty()) {
    out["note"] = row.note;
    return out;
  }
  const eval::BenchRow& r = row.row;
  out.update({{"what", r.what},
              {"layout", r.layout},
              {"act_sparsity", r.act_sparsity},
              {"device", common_.device},
              {"threads", common_.threads},
              {"median_ms", r.median_ms},
              {"min_ms", r.min_ms},
              {"max_ms", r.max_ms},
              {"runs", r.runs},
              {"bytes", r.bytes},
              {"gb_s", r.gb_s()},
              {"ceiling_gb_s", machine_.ceiling_gb_s},
              {"tok_s", r.tok_s},
              {"gflops", row.gflops},
              {"speedup", row.speedup.median},
              {"speedup_min", row.speedup.min},
              {"speedup_max", row.speedup.max},
              {"checked", r.checked},
              {"deviation", r.deviation}});
  if (machine_.gpu.empty())
    out.update({{"clock_ghz", machine_.clock_ghz}, {"isa", kernels::isa_name()}});
  else
    out["gpu"] = machine_.gpu;
  if (r.n > 0) out["n"] = r.n, out["k"] = r.k;
  if (r.access_ceiling_gb_s) out["access_ceiling_gb_s"] = *r.access_ceiling_gb_s;
  return out;
}

std::string SpqtReport::svg() const {
  std::vector<BarChart> charts;
  std::vector<std::string> parts;
  for (const SpqtRow& row : rows_) {
    const PartText& text = text_of(row.part);
    const size_t p = place_of(parts, row.part);
    if (p == charts.size()) {
      BarChart& chart = charts.emplace_back();
      chart.title = text.title;
      chart.unit = text.bars == PartText::Bars::ms ? "ms" : "x";
      if (text.bars != PartText::Bars::ms) chart.mark = 1;
    }
    BarChart& chart = charts[p];
    const size_t s = place_of(chart.series, row.variant);
    if (chart.groups.empty() || chart.groups.back().name != row.group) chart.groups.push_back({row.group, {}});
    std::vector<std::optional<double>>& values = chart.groups.back().values;
    values.resize(std::max(values.size(), s + 1));
    if (!row.note.empty()) continue;
    values[s] = text.bars == PartText::Bars::ms        ? row.row.median_ms
                : text.bars == PartText::Bars::speedup ? row.speedup.median
                                                       : 1 / row.speedup.median;
  }
  return draw(charts);
}

}  // namespace lacuna::cli
