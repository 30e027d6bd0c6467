// src/cli/spqt_report.h - the rows of `bench --spqt`: as a table, as JSON, as a drawing.
#pragma once

#include <optional>
#include <string>
#include <utility>
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

/// What the figures were measured on.
struct SpqtMachine {
  double ceiling_gb_s = 0;
  double clock_ghz = 0;  // of a CPU
  std::string gpu;       // name and driver; empty: the CPU
};

class SpqtReport {
 public:
  SpqtReport(const Common& common, SpqtMachine machine) : common_(common), machine_(std::move(machine)) {}
  /// Prints a row, as JSON where that was asked for.
  void add(const SpqtRow& row);
  /// One bar chart a part.
  std::string svg() const;

 private:
  void print_row(const SpqtRow& row);
  Json json(const SpqtRow& row) const;

  const Common& common_;
  SpqtMachine machine_;
  std::vector<SpqtRow> rows_;
};

}  // namespace lacuna::cli
