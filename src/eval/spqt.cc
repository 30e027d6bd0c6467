#include "eval/spqt.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/rng.h"
#include "eval/bandwidth.h"
#include "eval/spqt_baselines.h"
#include "kernels/active.h"
#include "layout/fallback.h"
#include "layout/zigzag.h"
#include "model/synth.h"

namespace lacuna::eval {
namespace {

constexpr double kLeastMs = 4;  // of one variant in one round

using Clock = std::chrono::steady_clock;
using Kind = GemvVariant::Kind;
using kernels::LinearGroup;
using kernels::WeightView;

/// One matrix in all the forms that the variants read, several times in memory each, and an input.
class Gemv {
 public:
  Gemv(layout::Shape shape, std::span<const GemvVariant> variants, ThreadPool& pool, const kernels::Plans* plans)
      : shape_(shape), pool_(pool) {
    rows_ = make(layout::get(layout::fitting_layout(layout::Id::q4_K, shape.K)));
    zigzag_ = make(layout::get(layout::Id::zz4_k));
    copies_count_ = cold_copies(int64_t(zigzag_.view.bytes.size()));
    for (const GemvVariant& variant : variants) {
      Set& set = sets_[set_of(variant.kind)];
      if (!set.run.empty()) continue;
      for (int64_t copy = 0; copy < copies_count_; ++copy) add_copy(variant.kind, set, plans);
    }
    Rng rng(uint64_t(shape.K) * 7919);
    x_.resize(size_t(shape.K));
    for (float& x : x_) x = float(rng.normal());
    active_.resize(size_t(shape.K));
    y_.resize(size_t(shape.N));
    sizes_ = x_;
    for (float& x : sizes_) x = std::fabs(x);
    std::sort(sizes_.begin(), sizes_.end());
  }

  int64_t copies() const { return copies_count_; }
  const WeightView& weight(Kind kind) const { return is_rows(kind) ? rows_.view : zigzag_.view; }

  /// Milliseconds of one product on weights that no cache holds.
  double run(const GemvVariant& variant) {
    Set& set = sets_[set_of(variant.kind)];
    const float threshold = threshold_of(variant.level);
    const auto start = Clock::now();
    set.run[set.next](threshold);
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    set.next = (set.next + 1) % set.run.size();
    return ms;
  }
  /// Relative error of a product; throws where it is too large.
  double check(const GemvVariant& variant) {
    std::fill(y_.begin(), y_.end(), NAN);
    run(variant);
    kernels::Activation input{x_.data(), 1, shape_.K};
    std::vector<int32_t> active(static_cast<size_t>(shape_.K));
    if (variant.level > 0) {
      input.active = active.data();
      input.active_count = collect(threshold_of(variant.level), active.data());
    }
    return check_result(weight(variant.kind), input, y_.data());
  }
  /// Share of the inputs that are left out.
  double sparsity(double level) {
    return level > 0 ? 1 - double(collect(threshold_of(level), active_.data())) / double(shape_.K) : 0;
  }

 private:
  struct Matrix {
    HugeBuffer bytes;
    WeightView view;
  };
  /// Copies that kinds share where they read the same form; a run takes the next one.
  struct Set {
    std::vector<std::function<void(float threshold)>> run;
    size_t next = 0;
  };

  static bool is_rows(Kind kind) { return kind == Kind::rows || kind == Kind::skipping_rows; }
  static size_t set_of(Kind kind) { return kind == Kind::sparse ? size_t(Kind::zigzag) : size_t(kind); }

  Matrix make(const layout::Layout& layout) const {
    Matrix out;
    out.bytes = model::random_matrix(layout, shape_, {}, 1, pool_);
    out.view = {std::string(layout.name), &layout, shape_, out.bytes.bytes()};
    return out;
  }
  int64_t collect(float threshold, int32_t* active) const {
    return kernels::collect_active(pool_, x_.data(), 1, shape_.K, nullptr, threshold, active);
  }
  float threshold_of(double level) const {
    return level > 0 ? sizes_[size_t(std::clamp<int64_t>(std::llround(level * double(shape_.K)), 0, shape_.K - 1))] : 0;
  }
  WeightView copy_of(const Matrix& matrix) {
    HugeBuffer& bytes = copies_.emplace_back(matrix.bytes.size());
    std::memcpy(bytes.data(), matrix.bytes.data(), matrix.bytes.size());
    WeightView view = matrix.view;
    view.bytes = bytes.bytes();
    return view;
  }

  void add_copy(Kind kind, Set& set, const kernels::Plans* plans) {
    switch (kind) {
      case Kind::skipping_rows: {
        const auto product = std::make_shared<SkippingRows>(copy_of(rows_), pool_);
        set.run.emplace_back([this, product](float threshold) { product->run(x_.data(), threshold, y_.data()); });
        return;
      }
      case Kind::unbalanced: {
        const auto product = std::make_shared<UnbalancedZigzag>(copy_of(zigzag_), pool_);
        set.run.emplace_back([this, product](float threshold) { product->run(x_.data(), threshold, y_.data()); });
        return;
      }
      case Kind::columns:
        throw Error("column-parallel products are of --device cuda");
      case Kind::rows:
      case Kind::zigzag:
      case Kind::sparse:
        break;
    }
    // A prepared group has a copy of its own; one that reads in place gets one.
    const Matrix& matrix = is_rows(kind) ? rows_ : zigzag_;
    const auto make_group = [&](const WeightView& view) {
      return kernels::make_cpu_linear_group({&view, 1}, pool_, kernels::Prepare::automatic,
                                            plans == nullptr ? kernels::default_plan() : plans->of({&view, 1}));
    };
    std::shared_ptr<LinearGroup> group = make_group(matrix.view);
    if (group->prepared_bytes() == 0) group = make_group(copy_of(matrix));
    group->reserve(1);
    set.run.emplace_back([this, group](float threshold) {
      kernels::Activation input{x_.data(), 1, shape_.K};
      if (threshold > 0) {
        input.active = active_.data();
        input.active_count = collect(threshold, active_.data());
      }
      const kernels::Output y{y_.data(), shape_.N};
      group->run(input, {&y, 1});
    });
  }

  layout::Shape shape_;
  ThreadPool& pool_;
  Matrix rows_, zigzag_;
  int64_t copies_count_ = 1;
  std::vector<HugeBuffer> copies_;
  Set sets_[size_t(Kind::columns) + 1];
  std::vector<float> x_, y_, sizes_;  // sizes: |x|, ascending
  std::vector<int32_t> active_;
};

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {0.5 * (values[values.size() / 2] + values[(values.size() - 1) / 2]), values.front(), values.back()};
}

}  // namespace

std::string GemvVariant::name() const {
  switch (kind) {
    case Kind::rows:
      return "q4_K";
    case Kind::zigzag:
      return "zz4_k dense";
    case Kind::sparse:
      return fmt::format("zz4_k {:.0f}%", 100 * level);
    case Kind::skipping_rows:
      return fmt::format("B1 {:.0f}%", 100 * level);
    case Kind::unbalanced:
      return fmt::format("B2 {:.0f}%", 100 * level);
    case Kind::columns:
      return fmt::format("columns {:.0f}%", 100 * level);
  }
  return "";
}

std::vector<NamedShape> layer_shapes(const model::ModelShape& s) {
  const int64_t q = s.n_heads * s.head_dim, kv = s.n_kv_heads * s.head_dim;
  const bool gated = s.architecture != "opt";
  return {{"q+k+v", {q + 2 * kv, s.n_embd}},
          {"o", {s.n_embd, q}},
          {gated ? "gate+up" : "up", {gated ? 2 * s.n_ff : s.n_ff, s.n_embd}},
          {"down", {s.n_embd, s.n_ff}}};
}

std::vector<NamedShape> matrix_shapes(const model::ModelShape& s) {
  const int64_t q = s.n_heads * s.head_dim, kv = s.n_kv_heads * s.head_dim;
  std::vector<NamedShape> out;
  const auto add = [&](const std::string& name, layout::Shape shape) {
    for (NamedShape& other : out) {
      if (!(other.shape == shape)) continue;
      other.name += ", " + name;
      return;
    }
    out.push_back({name, shape});
  };
  add("q", {q, s.n_embd});
  add("k", {kv, s.n_embd});
  add("v", {kv, s.n_embd});
  add("o", {s.n_embd, q});
  if (s.architecture != "opt") add("gate", {s.n_ff, s.n_embd});
  add("up", {s.n_ff, s.n_embd});
  add("down", {s.n_embd, s.n_ff});
  return out;
}

GemvRow describe_product(const std::string& name, const GemvVariant& variant, const WeightView& weight,
                         double sparsity) {
  GemvRow out;
  out.variant = variant;
  BenchRow& row = out.row;
  row.bench = "gemv";
  row.what = name;
  row.layout = weight.layout->name;
  row.n = weight.shape.N;
  row.k = weight.shape.K;
  row.checked = true;
  row.act_sparsity = sparsity;
  row.bytes = int64_t(weight.bytes.size());
  if (weight.layout->zigzag) row.bytes -= int64_t(sparsity * double(row.bytes));
  return out;
}

void set_rounds(std::vector<GemvRow>& rows, const std::vector<std::vector<double>>& times) {
  for (size_t v = 0; v < rows.size(); ++v) {
    std::vector<double> ratios;
    for (size_t round = 0; round < times[v].size(); ++round) ratios.push_back(times[0][round] / times[v][round]);
    rows[v].speedup = spread_of(ratios);
    BenchRow& row = rows[v].row;
    set_times(row, times[v]);
    row.tok_s = 1e3 / row.median_ms;
    rows[v].gflops = 2e-6 * double(row.n) * double(row.k) / row.median_ms;
  }
}

double GemvBench::ceiling(int64_t column_bytes, double level) {
  double& rate = ceilings_[{column_bytes, level}];
  if (rate == 0) rate = measure_column_read_gb_s(pool_, column_bytes, 1 - level);
  return rate;
}

std::vector<GemvRow> GemvBench::run(const std::string& name, layout::Shape shape,
                                    std::span<const GemvVariant> variants) {
  std::vector<GemvRow> out;
  std::vector<GemvVariant> wanted;
  for (const GemvVariant& variant : variants)
    if (variant.kind != Kind::skipping_rows || shape.K % 256 == 0) wanted.push_back(variant);
  {
    Gemv gemv(shape, wanted, pool_, options_.plans);
    for (const GemvVariant& variant : wanted) {
      out.push_back(describe_product(name, variant, gemv.weight(variant.kind), gemv.sparsity(variant.level)));
      out.back().row.deviation = gemv.check(variant);
    }
    std::vector<std::vector<double>> times(wanted.size());
    std::vector<int> repeats;  // of the next copies, so that the clock and the scheduler matter little
    for (const GemvVariant& variant : wanted)
      repeats.push_back(int(std::clamp(kLeastMs / gemv.run(variant), 1.0, double(gemv.copies()))));
    for (int round = 0; round < options_.runs; ++round) {
      for (size_t i = 0; i < wanted.size(); ++i) {
        const size_t v = (i + size_t(round)) % wanted.size();
        double ms = 0;
        for (int r = 0; r < repeats[v]; ++r) ms += gemv.run(wanted[v]);
        times[v].push_back(ms / repeats[v]);
      }
    }
    set_rounds(out, times);
  }
  // After the matrices have gone: it needs memory of its own.
  const int64_t column = layout::super_rows(shape.N) * layout::get(layout::Id::zz4_k).block_bytes;
  for (GemvRow& result : out)
    if (options_.ceilings && result.variant.kind == Kind::sparse)
      result.row.access_ceiling_gb_s = ceiling(column, result.variant.level);
  return out;
}

std::vector<GemvRow> add_up(const std::string& name, std::span<const std::vector<GemvRow>> products, int64_t times) {
  std::vector<GemvRow> out;
  if (products.empty()) return out;
  for (const GemvRow& first : products[0]) {
    GemvRow sum = first;
    sum.row.median_ms = sum.row.min_ms = sum.row.max_ms = sum.row.act_sparsity = 0;
    sum.row.bytes = sum.row.n = sum.row.k = 0;
    double flops = 0, weights = 0, ceiling_ns = 0;
    bool everywhere = true;
    for (const std::vector<GemvRow>& rows : products) {
      const auto found =
          std::find_if(rows.begin(), rows.end(), [&](const GemvRow& r) { return r.variant == first.variant; });
      if (found == rows.end()) {
        everywhere = false;
        break;
      }
      const BenchRow& row = found->row;
      const double count = double(row.n) * double(row.k);
      sum.row.median_ms += double(times) * row.median_ms;
      sum.row.min_ms += double(times) * row.min_ms;
      sum.row.max_ms += double(times) * row.max_ms;
      sum.row.bytes += times * row.bytes;
      sum.row.deviation = std::max(sum.row.deviation, row.deviation);
      sum.row.act_sparsity += count * row.act_sparsity;
      weights += count;
      flops += found->gflops * row.median_ms * double(times);
      if (row.access_ceiling_gb_s) ceiling_ns += double(times * row.bytes) / *row.access_ceiling_gb_s;
    }
    if (!everywhere) continue;
    sum.row.what = name;
    sum.row.act_sparsity /= std::max(1.0, weights);
    sum.row.tok_s = 1e3 / sum.row.median_ms;
    sum.gflops = flops / sum.row.median_ms;
    if (ceiling_ns > 0) sum.row.access_ceiling_gb_s = double(sum.row.bytes) / ceiling_ns;
    out.push_back(std::move(sum));
  }
  for (GemvRow& sum : out)
    sum.speedup = {out[0].row.median_ms / sum.row.median_ms, out[0].row.min_ms / sum.row.max_ms,
                   out[0].row.max_ms / sum.row.min_ms};
  return out;
}

}  // namespace lacuna::eval
