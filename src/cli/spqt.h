// src/cli/spqt.h - `bench --spqt`: the tables and figures of SpQt's evaluation, on this machine.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/sparsity.h"
#include "cli/spqt_report.h"
#include "kernels/linear.h"

namespace lacuna::cli {

/// What `bench` knows when it is asked for the report.
struct SpqtRequest {
  const Common& common;
  std::string model, synthetic;    // one of them, or neither
  std::vector<std::string> parts;  // empty: all that there is something for
  std::string svg, scratch;
  int runs = 10;
  int64_t gen = 128, n_layers = 0;
  uint64_t seed = 0;
  kernels::KvType kv = kernels::KvType::f16;
  const SparsityFlags& sparsity;
  const kernels::Plans* plans = nullptr;
  bool deterministic = false;
  double ceiling_gb_s = 0;  // of the CPU's memory
  GpuFlags gpu;
};

/// The names of the parts.
std::vector<std::string> spqt_parts();

/// Throws Error for a request that cannot be fulfilled, before anything is measured.
void check_spqt(const SpqtRequest& request);

int run_spqt(const SpqtRequest& request);

/// Table 2: decoding in f16, q4_K and zz4_k, dense and with inputs left out, after a prompt of 10 tokens.
void report_decoding(const SpqtRequest& request, SpqtReport& report);

}  // namespace lacuna::cli
