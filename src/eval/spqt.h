// src/eval/spqt.h - SpQt's micro-benchmarks (section 6.3) on this machine: one matrix times one token, dense and with
// inputs left out, beside the baselines. Weights are random and cold; every result is checked before the clock starts.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "eval/group_bench.h"
#include "kernels/linear.h"
#include "model/shapes.h"

namespace lacuna::eval {

/// A way to multiply one token.
struct GemvVariant {
  enum class Kind : uint8_t {
    rows,           // q4_K, dense: what the speed-ups are against
    zigzag,         // zz4_k, dense
    sparse,         // zz4_k: the active inputs are collected, then their columns multiplied
    skipping_rows,  // B1
    unbalanced,     // B2
    columns,        // CUDA only: column-parallel, section 4.2's first idea
  };
  Kind kind = Kind::rows;
  double level = 0;  // share of inputs that are left out; 0 where dense

  /// "q4_K", "zz4_k dense", "zz4_k 50%", "B1 50%", "B2 50%", "columns 50%".
  std::string name() const;
  friend bool operator==(const GemvVariant&, const GemvVariant&) = default;
};

/// Median, least and largest of what each round gave.
struct Spread {
  double median = 0, min = 0, max = 0;
};

struct GemvRow {
  GemvVariant variant;
  BenchRow row;
  double gflops = 0;  // dense-equivalent: 2 N K a token, whatever is left out
  Spread speedup;     // time of the round's first variant / time of this one
};

struct GemvOptions {
  int runs = 10;
  const kernels::Plans* plans = nullptr;  // of the zigzag groups; nullptr: the default plan
  bool ceilings = true;                   // measure what memory gives where columns are skipped
};

/// Matrices of one model's layer, each read by one input: "q+k+v", "o", "gate+up", "down".
struct NamedShape {
  std::string name;
  layout::Shape shape;
};
std::vector<NamedShape> layer_shapes(const model::ModelShape& shape);
/// The different matrices of a model, one by one: "q, o", "k, v", "gate, up", "down".
std::vector<NamedShape> matrix_shapes(const model::ModelShape& shape);

/// Where products are timed.
class ProductBench {
 public:
  virtual ~ProductBench() = default;
  /// One row a variant, in their order; a round runs each once, on weights of its own. B1 needs inputs in blocks of
  /// 256: it is left out where K is no multiple of that. Throws Error when a result is off.
  virtual std::vector<GemvRow> run(const std::string& name, layout::Shape shape,
                                   std::span<const GemvVariant> variants) = 0;
};

/// The CPU.
class GemvBench final : public ProductBench {
 public:
  GemvBench(ThreadPool& pool, const GemvOptions& options) : pool_(pool), options_(options) {}
  std::vector<GemvRow> run(const std::string& name, layout::Shape shape,
                           std::span<const GemvVariant> variants) override;

 private:
  double ceiling(int64_t column_bytes, double level);

  ThreadPool& pool_;
  GemvOptions options_;
  std::map<std::pair<int64_t, double>, double> ceilings_;
};

/// The row of a product that has been checked; its times are left open. sparsity: share of the inputs left out.
GemvRow describe_product(const std::string& name, const GemvVariant& variant, const kernels::WeightView& weight,
                         double sparsity);
/// times: ms, [rows][rounds].
void set_rounds(std::vector<GemvRow>& rows, const std::vector<std::vector<double>>& times);

/// The rows of several products, run `times` times one after the other, as one row a variant: times and bytes add up.
/// Variants that not all products have are left out. The spread of the speed-up is that of the products' sums.
std::vector<GemvRow> add_up(const std::string& name, std::span<const std::vector<GemvRow>> products, int64_t times);

}  // namespace lacuna::eval
