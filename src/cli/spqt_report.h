// src/cli/spqt_report.h - the rows of `bench --spqt`: as a table, as JSON, as a drawing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "eval/spqt.h"

namespace lacuna::cli {

struct SpqtRow {
  std::string part;     // "table2", "fig7" ... "fig10"
  std::string group;    // rows that are compared: "llama-3-8b gate, up 14336 x 4096"
  std::string variant;  // "q4_K", "zz4_k 50%", "greedy 25%"
  eval::BenchRow row;
  double gflops = 0;
  eval::Spread speedup;  // over the part's baseline, q4_K
  std::string note;      // why there is no result
};

class SpqtReport {
 public:
  SpqtReport(const Common& common, double ceiling_gb_s, double clock_ghz)
      : common_(common), ceiling_gb_s_(ceiling_gb_s), clock_ghz_(clock_ghz) {}
  /// Prints a row, as JSON where that was asked for.
  void add(const SpqtRow& row);
  /// One bar chart a part.
  std::string svg() const;

 private:
  void print_row(const SpqtRow& row);
  Json json(const SpqtRow& row) const;

  const Common& common_;
  double ceiling_gb_s_, clock_ghz_;
  std::vector<SpqtRow> rows_;
};

}  // namespace lacuna::cli
