#include "eval/cuda_linear.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/cuda/active.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/prepared.h"
#include "model/synth.h"

namespace lacuna::eval {
namespace {

using cuda::Columns;
using cuda::GemvArgs;
using cuda::GemvPlan;
using cuda::Inputs;

// Factors are rounded to f16 twice, sums of eight products are f16's: each a relative error of at most 2^-11, spread
// evenly, of terms that do not all have one sign. A wrong kernel makes it about 1.
constexpr double kTolerance = 0.003;
constexpr int64_t kAlign = 256;
constexpr std::string_view kListsReady = ", lists ready", kListKernels = ", list kernels";

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// What a row of results times.
enum class Mode { dense, collects, list, list_kernel };

/// Weights that read one input: one kind, the same values in every layer.
struct Kind {
  std::string name;
  cuda::PreparedGroup prepared;
  std::vector<layout::Shape> shapes;
  std::vector<float> x;
  float threshold = 0;
  std::vector<int32_t> active;
  std::vector<std::vector<float>> expected;  // of each part
  // Bytes into a layer's weights, into the inputs and into a layer's outputs.
  int64_t codes_at = 0, headers_at = 0, x_at = 0, list_at = 0, count_at = 0, y_at = 0;

  int64_t outputs() const { return prepared.rows * 256; }  // padded
};

class Bench {
 public:
  Bench(const model::ModelShape& shape, ThreadPool& pool, const CudaLinearOptions& options);
  CudaLinearResult run();

 private:
  void make_kinds(const model::ModelShape& shape, ThreadPool& pool);
  void upload();
  BenchRow time(Mode mode, std::string& plans);
  /// All launches of a token. keep_first: the last one leaves the first one's outputs alone.
  void launch(Mode mode, const std::vector<GemvPlan>& choices, bool keep_first);
  double check(Mode mode, const std::vector<GemvPlan>& choices);
  double measure(Mode mode, const std::vector<GemvPlan>& choices, int runs);
  std::vector<GemvPlan> tune(Mode mode);
  Columns columns(int64_t layer, size_t kind) const;
  float* outputs(int64_t layer, size_t kind) const {
    return reinterpret_cast<float*>(y_.data() + layer * layer_y_ + kinds_[kind].y_at);
  }

  CudaLinearOptions options_;
  const layout::Layout& layout_;
  int64_t n_layers_;
  std::vector<Kind> kinds_;
  int64_t layer_bytes_ = 0, layer_y_ = 0, input_bytes_ = 0;
  std::optional<cuda::Device> device_;
  cuda::Buffer weights_, inputs_, y_, partial_, arrived_;
  std::unique_ptr<cuda::Stream> stream_;
  std::vector<GemvPlan> list_plans_;
};

Bench::Bench(const model::ModelShape& shape, ThreadPool& pool, const CudaLinearOptions& options)
    : options_(options),
      layout_(layout::get(options.layout)),
      n_layers_(options.n_layers > 0 ? options.n_layers : shape.n_layers) {
  cuda::column_form(layout_);  // what no kernel reads is refused first
  device_.emplace(options.device);
  make_kinds(shape, pool);
  upload();
}

void Bench::make_kinds(const model::ModelShape& shape, ThreadPool& pool) {
  const int64_t q = shape.n_heads * shape.head_dim, kv = shape.n_kv_heads * shape.head_dim;
  const struct {
    const char* name;
    int64_t K;
    std::vector<int64_t> outputs;
  } groups[] = {{"q+k+v", shape.n_embd, {q, kv, kv}},
                {"o", q, {shape.n_embd}},
                {"gate+up", shape.n_embd, {shape.n_ff, shape.n_ff}},
                {"down", shape.n_ff, {shape.n_embd}}};
  const cuda::ColumnForm& form = cuda::column_form(layout_);
  int64_t layer = 0;  // known before anything is made
  for (const auto& group : groups)
    for (const int64_t N : group.outputs) layer += (N + 255) / 256 * group.K * (form.code_bytes + form.header_bytes);
  device_->require(layer * n_layers_, fmt::format("{} layers of {} in {}", n_layers_, shape.name, layout_.name));
  for (const auto& group : groups) {
    Kind& kind = kinds_.emplace_back();
    kind.name = group.name;
    Rng rng(options_.seed + uint64_t(kinds_.size()));
    std::vector<HugeBuffer> matrices;
    std::vector<kernels::WeightView> views;
    for (const int64_t N : group.outputs) {
      kind.shapes.push_back({N, group.K});
      matrices.push_back(model::random_matrix(layout_, kind.shapes.back(), {256}, rng.next(), pool));
      views.push_back({kind.name, &layout_, kind.shapes.back(), matrices.back().bytes(), {}, {256}});
    }
    kind.prepared = cuda::prepare_group(views, pool);
    kind.x.resize(size_t(group.K));
    for (float& x : kind.x) x = float(rng.normal());
    std::vector<float> sizes = kind.x;
    for (float& size : sizes) size = std::fabs(size);
    std::sort(sizes.begin(), sizes.end());
    const auto skipped = size_t(std::lround(options_.act_sparsity * double(group.K)));
    kind.threshold = skipped < sizes.size() ? sizes[skipped] : std::nextafter(sizes.back(), INFINITY);
    for (int64_t k = 0; k < group.K; ++k)
      if (options_.act_sparsity == 0 || !(std::fabs(kind.x[size_t(k)]) < kind.threshold))
        kind.active.push_back(int32_t(k));
    kernels::Activation input{kind.x.data(), 1, group.K};
    input.active = kind.active.data();
    input.active_count = int64_t(kind.active.size());
    kind.expected.resize(views.size());
    for (size_t i = 0; i < views.size(); ++i) kind.expected[i].resize(size_t(views[i].shape.N));
    pool.parallel_for(int64_t(views.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        kernels::reference_linear(views[size_t(i)], input, {kind.expected[size_t(i)].data(), views[size_t(i)].shape.N});
    });
    const auto place = [](int64_t& total, int64_t bytes) { return std::exchange(total, total + aligned(bytes)); };
    kind.codes_at = place(layer_bytes_, int64_t(kind.prepared.codes.size()));
    kind.headers_at = place(layer_bytes_, int64_t(kind.prepared.headers.size()));
    kind.x_at = place(input_bytes_, 4 * group.K);
    kind.list_at = place(input_bytes_, 4 * group.K);
    kind.count_at = place(input_bytes_, 4);
    kind.y_at = place(layer_y_, 4 * kind.outputs());
  }
}

void Bench::upload() {
  weights_ = cuda::Buffer(*device_, layer_bytes_ * n_layers_, "weights");
  inputs_ = cuda::Buffer(*device_, input_bytes_, "inputs");
  y_ = cuda::Buffer(*device_, layer_y_ * n_layers_, "outputs");
  stream_ = std::make_unique<cuda::Stream>(*device_);
  int64_t rows = 0, outputs = 0;
  for (const Kind& kind : kinds_) {
    weights_.upload(kind.prepared.codes.bytes(), kind.codes_at);
    weights_.upload(kind.prepared.headers.bytes(), kind.headers_at);
    inputs_.upload(std::as_bytes(std::span(kind.x)), kind.x_at);
    cuda::collect_active(*device_, *stream_, reinterpret_cast<float*>(inputs_.data() + kind.x_at),
                         int64_t(kind.x.size()), nullptr, kind.threshold,
                         reinterpret_cast<int32_t*>(inputs_.data() + kind.list_at),
                         reinterpret_cast<int32_t*>(inputs_.data() + kind.count_at));
    rows = std::max(rows, kind.prepared.rows);
    outputs = std::max(outputs, kind.outputs());
  }
  for (int64_t layer = 1; layer < n_layers_; ++layer) weights_.copy_within(0, layer * layer_bytes_, layer_bytes_);
  if (options_.deterministic) {
    partial_ = cuda::Buffer(*device_, 4 * outputs * cuda::kMostSegments, "partial sums");
    arrived_ = cuda::Buffer(*device_, 4 * rows, "counters");
    arrived_.fill(0);
  }
  stream_->synchronize();
}

Columns Bench::columns(int64_t layer, size_t kind) const {
  const std::byte* const base = weights_.data() + layer * layer_bytes_;
  const Kind& k = kinds_[kind];
  return {base + k.codes_at, base + k.headers_at, k.prepared.rows, k.prepared.K};
}

void Bench::launch(Mode mode, const std::vector<GemvPlan>& choices, bool keep_first) {
  const size_t kinds = kinds_.size();
  for (int64_t layer = 0; layer < n_layers_; ++layer) {
    for (size_t i = 0; i < kinds; ++i) {
      const Kind& kind = kinds_[i];
      const int64_t next_layer = i + 1 < kinds ? layer : (layer + 1) % n_layers_;
      const size_t next = (i + 1) % kinds;
      const bool last = next_layer == 0 && next == 0;
      GemvArgs args;
      args.weights = columns(layer, i);
      args.inputs = mode == Mode::dense ? Inputs::dense : mode == Mode::collects ? Inputs::threshold : Inputs::list;
      args.x = reinterpret_cast<const float*>(inputs_.data() + kind.x_at);
      args.threshold = kind.threshold;
      args.list = reinterpret_cast<int32_t*>(inputs_.data() + kind.list_at);
      args.count = reinterpret_cast<int32_t*>(inputs_.data() + kind.count_at);
      args.y = outputs(layer, i);
      if (!last || !keep_first) {
        args.zero = outputs(next_layer, next);
        args.zero_count = kinds_[next].outputs();
      }
      if (options_.deterministic) args.workspace = {partial_.as<float>(), arrived_.as<uint32_t>()};
      if (mode == Mode::list_kernel)
        cuda::collect_active(*device_, *stream_, args.x, kind.prepared.K, nullptr, kind.threshold,
                             const_cast<int32_t*>(args.list), const_cast<int32_t*>(args.count));
      cuda::launch_gemv(*device_, *stream_, layout_, choices[i], args);
    }
  }
}

double Bench::check(Mode mode, const std::vector<GemvPlan>& choices) {
  y_.fill(0xff);  // not numbers
  const std::vector<std::byte> zeros(size_t(4 * kinds_[0].outputs()));
  y_.upload(zeros, kinds_[0].y_at);  // every other one is cleared by the launch before
  launch(mode, choices, true);
  stream_->synchronize();
  std::vector<float> all(size_t(layer_y_ / 4));
  double worst = 0;
  for (int64_t layer = 0; layer < n_layers_; ++layer) {
    y_.download(std::as_writable_bytes(std::span(all)), layer * layer_y_);
    for (const Kind& kind : kinds_) {
      double error = 0, norm = 0;
      for (size_t part = 0; part < kind.expected.size(); ++part) {
        const float* const y = all.data() + kind.y_at / 4 + kind.prepared.first_output[part];
        for (size_t n = 0; n < kind.expected[part].size(); ++n) {
          const double e = kind.expected[part][n], d = double(y[n]) - e;
          error += d * d;
          norm += e * e;
        }
      }
      const double deviation = std::sqrt(error / std::max(norm, 1e-30));
      if (!(deviation <= kTolerance))
        throw Error("layer {}, {}: the kernel's result is off by {:.3g} of its size (at most {} allowed)", layer,
                    kind.name, deviation, kTolerance);
      worst = std::max(worst, deviation);
    }
  }
  return worst;
}

double Bench::measure(Mode mode, const std::vector<GemvPlan>& choices, int runs) {
  cuda::Graph graph(*stream_, [&] { launch(mode, choices, false); });
  cuda::Stopwatch watch;
  std::vector<double> times;
  for (int run = -1; run < runs; ++run) {
    watch.start(*stream_);
    graph.launch(*stream_);
    const double ms = watch.stop_ms(*stream_);
    if (run >= 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

std::vector<GemvPlan> Bench::tune(Mode mode) {
  const auto kernels = cuda::kernel_plans(layout_);
  const bool sparse = mode != Mode::dense;
  const auto with = [](GemvPlan plan, float headers, float codes) {
    plan.early_headers = headers, plan.early_codes = codes;
    return plan;
  };
  std::vector<GemvPlan> best;
  for (size_t i = 0; i < kinds_.size(); ++i)
    best.push_back(
        cuda::default_plan(device_->info(), layout_, columns(0, i), sparse ? Inputs::threshold : Inputs::dense));
  constexpr int kRuns = 3;
  double least = measure(mode, best, kRuns);
  const auto attempt = [&](size_t i, const GemvPlan& plan) {
    if (plan == best[i]) return;
    std::vector<GemvPlan> tried = best;
    tried[i] = plan;
    const double ms = measure(mode, tried, kRuns);
    if (ms < least * 0.998) {
      least = ms;
      best = std::move(tried);
    }
  };
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < kinds_.size(); ++i) {
      for (const GemvPlan& kernel : kernels)
        for (const double fill : {0.35, 0.5, 0.66, 0.8, 1.0, 1.5})
          attempt(i, cuda::filled(device_->info(), columns(0, i),
                                  with(kernel, best[i].early_headers, best[i].early_codes), fill));
      if (!sparse) continue;
      for (const float codes : {0.0f, 0.1f, 0.2f, 0.3f, 0.5f}) attempt(i, with(best[i], 1, codes));
      attempt(i, with(best[i], 0, best[i].early_codes));
    }
  }
  return best;
}

BenchRow Bench::time(Mode mode, std::string& plans) {
  // Lists are read in the same way whoever makes them.
  const std::vector<GemvPlan> choices = mode == Mode::list_kernel ? list_plans_ : tune(mode);
  if (mode == Mode::list) list_plans_ = choices;
  BenchRow row;
  row.bench = "linear";
  row.what = fmt::format("{} layers", n_layers_);
  if (mode == Mode::list) row.what += kListsReady;
  if (mode == Mode::list_kernel) row.what += kListKernels;
  row.layout = layout_.name;
  row.deviation = check(mode, choices);
  double skipped = 0, all = 0;
  for (const Kind& kind : kinds_) {
    const double share = mode == Mode::dense ? 1 : double(kind.active.size()) / double(kind.x.size());
    for (const layout::Shape& shape : kind.shapes) {
      const double bytes = double(layout_.size_bytes(shape));
      all += bytes;
      skipped += bytes * (1 - share);
    }
  }
  row.bytes = int64_t((all - skipped) * double(n_layers_));
  row.act_sparsity = skipped / all;
  for (size_t i = 0; i < kinds_.size(); ++i)
    plans += fmt::format("{}{}: {}", i == 0 ? "" : "; ", kinds_[i].name, describe(choices[i]));

  cuda::Graph graph(*stream_, [&] { launch(mode, choices, false); });
  cuda::Stopwatch watch;
  std::vector<double> times;
  for (int run = -3; run < options_.runs; ++run) {
    watch.start(*stream_);
    graph.launch(*stream_);
    const double ms = watch.stop_ms(*stream_);
    if (run >= 0) times.push_back(ms);
  }
  set_times(row, std::move(times));
  row.tok_s = 1e3 / row.median_ms;
  row.deviation = std::max(row.deviation, check(mode, choices));
  row.checked = true;
  return row;
}

CudaLinearResult Bench::run() {
  CudaLinearResult result;
  result.device = device_->info();
  result.ceiling_gb_s = cuda::measure_read_gb_s(*device_, *stream_, weights_);
  for (const Mode mode : options_.act_sparsity == 0 ? std::vector<Mode>{Mode::dense}
                                                    : std::vector<Mode>{Mode::collects, Mode::list, Mode::list_kernel})
    result.rows.push_back(time(mode, result.plans.emplace_back()));
  return result;
}

}  // namespace

double list_share(const CudaLinearResult& result) {
  double ready = 0, made = 0;
  for (const BenchRow& row : result.rows) {
    if (row.what.ends_with(kListsReady)) ready = row.median_ms;
    if (row.what.ends_with(kListKernels)) made = row.median_ms;
  }
  return ready > 0 && made > ready ? (made - ready) / made : 0;
}

CudaLinearResult bench_cuda_linear(const model::ModelShape& shape, ThreadPool& pool, const CudaLinearOptions& options) {
  return Bench(shape, pool, options).run();
}

}  // namespace lacuna::eval
