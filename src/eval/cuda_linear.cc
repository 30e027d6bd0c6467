#include "eval/cuda_linear.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/cuda/active.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/plan_search.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda/rows.h"
#include "model/synth.h"

namespace lacuna::eval {
namespace {

using cuda::Columns;
using cuda::GemvArgs;
using cuda::GemvPlan;
using cuda::Groups;
using cuda::GroupsArgs;
using cuda::GroupsPlan;
using cuda::Inputs;
using layout::Family;

// Factors are rounded to f16 twice, sums of eight products are f16's: each a relative error of at most 2^-11, spread
// evenly, of terms that do not all have one sign. A wrong kernel makes it about 1.
constexpr double kTolerance = 0.003;
/// Of inputs rounded to 8 bits: half a step of 127 of each group's largest, evenly spread, of normal inputs.
constexpr double kInt8Tolerance = 0.012;
constexpr int64_t kAlign = 256;
constexpr std::string_view kListsReady = ", lists ready", kListKernels = ", list kernels", kStream = ", stream-K",
                           kSlice = ", slice-K", kEightBits = ", 8-bit inputs", kTensorCores = ", tensor cores",
                           kMultiplyAdds = ", multiply-adds", kInputsReady = ", inputs ready",
                           kInputKernels = ", input kernels";
/// Blocks of a multiprocessor that any plan has.
constexpr int64_t kMostBlocks = 8;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// What a row of results times: zigzag and row layouts; then group-sparse ones.
enum class Mode { dense, collects, list, list_kernel, stream, ready, input_kernel, slice, int8, mma, fma };
bool is_of_groups(Mode mode) { return mode >= Mode::stream; }
/// Kernels that read the weights as chunks also where units are faster.
bool is_of_chunks(Mode mode) { return mode >= Mode::mma; }

/// How a kind is launched.
struct Choice {
  GemvPlan columns;
  GroupsPlan groups;
  bool operator==(const Choice&) const = default;
};

/// Weights that read one input: one kind, the same values in every layer.
struct Kind {
  std::string name;
  cuda::PreparedGroup columns;        // zigzag
  cuda::PreparedGroups groups;        // group-sparse
  cuda::PreparedGroups chunks;        // the same, where groups has units
  std::vector<HugeBuffer> rows;       // of each part, else
  std::vector<int64_t> rows_at;       // bytes into the layer's weights
  std::vector<int64_t> first_output;  // of each part
  int64_t outputs = 0, K = 0;         // outputs: padded
  std::vector<layout::Shape> shapes;
  std::vector<layout::Params> params;
  std::vector<float> x;
  float threshold = 0;
  std::vector<int32_t> active;
  std::vector<std::vector<float>> expected;  // of each part
  // Bytes into a layer's weights, into the inputs and into a layer's outputs.
  int64_t codes_at = 0, headers_at = 0, chunks_at = 0, x_at = 0, list_at = 0, count_at = 0, y_at = 0, ready_at = 0;
};

/// Outputs of a matrix that are drawn together, and the share of their groups that is dropped.
struct Band {
  int64_t N;
  double sparsity;
};

class Bench {
 public:
  Bench(const model::LinearLayers& layers, ThreadPool& pool, const CudaLinearOptions& options);
  CudaLinearResult run();

 private:
  void make_kinds(const model::LinearLayers& layers, ThreadPool& pool);
  void upload();
  BenchRow time(Mode mode, std::string& plans);
  /// All launches of a token. keep_first: the last one leaves the first one's outputs alone.
  void launch(Mode mode, const std::vector<Choice>& choices, bool keep_first);
  double check(Mode mode, const std::vector<Choice>& choices);
  double measure(Mode mode, const std::vector<Choice>& choices, int runs);
  std::vector<Choice> tune(Mode mode);
  std::vector<Choice> choices_for(Mode mode, size_t kind, const Choice& now) const;
  std::vector<Mode> modes() const;
  std::vector<Band> bands(int64_t N) const;
  void prepare(Kind& kind, std::span<const kernels::WeightView> views, ThreadPool& pool);
  Columns columns(int64_t layer, size_t kind) const;
  Groups groups(int64_t layer, size_t kind, Mode mode) const;
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
  std::vector<Choice> list_plans_;
};

Bench::Bench(const model::LinearLayers& layers, ThreadPool& pool, const CudaLinearOptions& options)
    : options_(options),
      layout_(layout::get(options.layout)),
      n_layers_(options.n_layers > 0 ? options.n_layers : layers.n_layers) {
  if (int64_t(layers.groups.size()) * n_layers_ < 2)
    throw Error(
        "one product alone stays in the cache, and a launch clears the outputs of the next: give --layers 2 or more");
  // What no kernel reads is refused first.
  if (layout_.family == Family::zigzag)
    cuda::column_form(layout_);
  else if (layout_.family != Family::group_sparse)
    cuda::row_form(layout_);
  if (layout_.family != Family::zigzag && options.act_sparsity > 0)
    throw Error("--act-sparsity: the kernels of {} skip nothing; ask for a zigzag layout", layout_.name);
  if (options.uneven_rows && layout_.family != Family::group_sparse)
    throw Error("--uneven-rows is of layouts that drop groups, gs2 to gs16; {} does not", layout_.name);
  device_.emplace(options.device);
  make_kinds(layers, pool);
  upload();
}

std::vector<Band> Bench::bands(int64_t N) const {
  if (!options_.uneven_rows) return {{N, options_.weight_sparsity}};
  std::vector<Band> out;
  constexpr double kShares[] = {0.4, 1.2, 1.6, 0.8};  // of the sparsity; 1 in the mean
  for (size_t i = 0; i < std::size(kShares); ++i)
    out.push_back({N * int64_t(i + 1) / 4 - N * int64_t(i) / 4, std::min(1.0, options_.weight_sparsity * kShares[i])});
  return out;
}

void Bench::prepare(Kind& kind, std::span<const kernels::WeightView> views, ThreadPool& pool) {
  const auto place = [](int64_t& total, int64_t bytes) { return std::exchange(total, total + aligned(bytes)); };
  kind.K = views[0].shape.K;
  if (layout_.family == Family::zigzag) {
    kind.columns = cuda::prepare_group(views, pool);
    kind.first_output = kind.columns.first_output;
    kind.outputs = kind.columns.rows * 256;
    kind.codes_at = place(layer_bytes_, int64_t(kind.columns.codes.size()));
    kind.headers_at = place(layer_bytes_, int64_t(kind.columns.headers.size()));
  } else if (layout_.family == Family::group_sparse) {
    kind.groups = cuda::prepare_groups(views, pool);
    kind.first_output = kind.groups.first_output;
    kind.outputs = kind.groups.panels * cuda::kPanelRows;
    kind.codes_at = place(layer_bytes_, cuda::laid_out_bytes(kind.groups));
    if (!kind.groups.quads.empty()) {
      kind.chunks = cuda::prepare_groups(views, pool, cuda::GroupsForm::chunks);
      kind.chunks_at = place(layer_bytes_, cuda::laid_out_bytes(kind.chunks));
    }
  } else {
    for (const kernels::WeightView& view : views) {
      const int64_t bytes = view.shape.N * cuda::row_places(layout_, view.shape.K, view.params).row_bytes;
      cuda::prepare_rows(layout_, view.shape, view.params, view.bytes, pool,
                         kind.rows.emplace_back(size_t(bytes)).data());
      kind.rows_at.push_back(place(layer_bytes_, bytes));
      kind.first_output.push_back(kind.outputs);
      kind.outputs += (view.shape.N + 255) / 256 * 256;
    }
  }
}

void Bench::make_kinds(const model::LinearLayers& layers, ThreadPool& pool) {
  int64_t layer = 0;  // known before anything is made
  const auto params_of = [&](layout::Shape of, double sparsity) {
    layout::Params params = {.tile_rows = 256};
    if (layout_.family != Family::zigzag) params = {.group_size = options_.group_size};
    return model::random_params(layout_, of, params, sparsity);
  };
  for (const auto& group : layers.groups)
    for (const int64_t N : group.outputs)
      for (const Band& band : bands(N))
        layer += layout_.size_bytes({band.N, group.K}, params_of({band.N, group.K}, band.sparsity));
  device_->require(layer * n_layers_, fmt::format("{} layers of {} in {}", n_layers_, layers.name, layout_.name));
  for (const auto& group : layers.groups) {
    Kind& kind = kinds_.emplace_back();
    kind.name = group.name;
    Rng rng(options_.seed + uint64_t(kinds_.size()));
    std::vector<HugeBuffer> matrices;
    std::vector<kernels::WeightView> views;
    for (const int64_t N : group.outputs)
      for (const Band& band : bands(N)) {
        kind.shapes.push_back({band.N, group.K});
        kind.params.push_back(params_of(kind.shapes.back(), band.sparsity));
        matrices.push_back(
            model::random_matrix(layout_, kind.shapes.back(), kind.params.back(), rng.next(), pool, band.sparsity));
        views.push_back({kind.name, &layout_, kind.shapes.back(), matrices.back().bytes(), {}, kind.params.back()});
      }
    prepare(kind, views, pool);
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
    kind.x_at = place(input_bytes_, 4 * group.K);
    kind.list_at = place(input_bytes_, 4 * group.K);
    kind.count_at = place(input_bytes_, 4);
    kind.ready_at = place(input_bytes_, cuda::group_inputs_bytes(group.K));
    kind.y_at = place(layer_y_, 4 * kind.outputs);
  }
}

void Bench::upload() {
  weights_ = cuda::Buffer(*device_, layer_bytes_ * n_layers_, "weights");
  inputs_ = cuda::Buffer(*device_, input_bytes_, "inputs");
  y_ = cuda::Buffer(*device_, layer_y_ * n_layers_, "outputs");
  stream_ = std::make_unique<cuda::Stream>(*device_);
  int64_t outputs = 0;
  for (const Kind& kind : kinds_) {
    if (layout_.family == Family::zigzag) {
      weights_.upload(kind.columns.codes.bytes(), kind.codes_at);
      weights_.upload(kind.columns.headers.bytes(), kind.headers_at);
    } else if (layout_.family == Family::group_sparse) {
      const auto put = [&](int64_t base) {
        return [this, base](int64_t at, std::span<const std::byte> bytes) { weights_.upload(bytes, base + at); };
      };
      cuda::each_part(kind.groups, put(kind.codes_at));
      if (!kind.groups.quads.empty()) cuda::each_part(kind.chunks, put(kind.chunks_at));
    }
    for (size_t i = 0; i < kind.rows.size(); ++i) weights_.upload(kind.rows[i].bytes(), kind.rows_at[i]);
    inputs_.upload(std::as_bytes(std::span(kind.x)), kind.x_at);
    cuda::collect_active(*device_, *stream_, reinterpret_cast<float*>(inputs_.data() + kind.x_at),
                         int64_t(kind.x.size()), nullptr, kind.threshold,
                         reinterpret_cast<int32_t*>(inputs_.data() + kind.list_at),
                         reinterpret_cast<int32_t*>(inputs_.data() + kind.count_at));
    if (!kind.groups.quads.empty()) {
      GroupsArgs args;
      args.weights = groups(0, size_t(&kind - kinds_.data()), Mode::ready);
      args.x = reinterpret_cast<const float*>(inputs_.data() + kind.x_at);
      cuda::launch_group_inputs(*device_, *stream_, args, inputs_.data() + kind.ready_at);
    }
    outputs = std::max(outputs, kind.outputs);
  }
  for (int64_t layer = 1; layer < n_layers_; ++layer) weights_.copy_within(0, layer * layer_bytes_, layer_bytes_);
  if (options_.deterministic) {
    const int64_t blocks = cuda::kMostSegments + int64_t{device_->info().multiprocessors} * kMostBlocks;
    partial_ = cuda::Buffer(*device_, 4 * (outputs * cuda::kMostSegments + blocks * cuda::kPanelRows), "partial sums");
    arrived_ = cuda::Buffer(*device_, 4 * (outputs / 256), "counters");
    arrived_.fill(0);
  }
  stream_->synchronize();
}

Columns Bench::columns(int64_t layer, size_t kind) const {
  const std::byte* const base = weights_.data() + layer * layer_bytes_;
  const Kind& k = kinds_[kind];
  return {base + k.codes_at, base + k.headers_at, k.columns.rows, k.columns.K};
}

Groups Bench::groups(int64_t layer, size_t kind, Mode mode) const {
  const std::byte* const base = weights_.data() + layer * layer_bytes_;
  const Kind& k = kinds_[kind];
  return is_of_chunks(mode) && !k.groups.quads.empty() ? cuda::laid_out(k.chunks, base + k.chunks_at)
                                                       : cuda::laid_out(k.groups, base + k.codes_at);
}

void Bench::launch(Mode mode, const std::vector<Choice>& choices, bool keep_first) {
  const size_t kinds = kinds_.size();
  for (int64_t layer = 0; layer < n_layers_; ++layer) {
    for (size_t i = 0; i < kinds; ++i) {
      const Kind& kind = kinds_[i];
      const int64_t next_layer = i + 1 < kinds ? layer : (layer + 1) % n_layers_;
      const size_t next = (i + 1) % kinds;
      const bool last = next_layer == 0 && next == 0, clears = !last || !keep_first;
      const auto* const x = reinterpret_cast<const float*>(inputs_.data() + kind.x_at);
      float* const zero = clears ? outputs(next_layer, next) : nullptr;
      const int64_t zero_count = clears ? kinds_[next].outputs : 0;
      cuda::Workspace workspace;
      if (options_.deterministic) workspace = {partial_.as<float>(), arrived_.as<uint32_t>()};
      if (is_of_groups(mode)) {
        GroupsArgs args;
        args.weights = groups(layer, i, mode);
        args.input_bits = mode == Mode::int8 ? cuda::InputBits::int8 : cuda::InputBits::half;
        args.x = x;
        args.y = outputs(layer, i);
        args.zero = zero, args.zero_count = zero_count;
        args.workspace = workspace;
        if (mode == Mode::ready || mode == Mode::input_kernel) args.ready = inputs_.data() + kind.ready_at;
        if (mode == Mode::input_kernel)
          cuda::launch_group_inputs(*device_, *stream_, args, inputs_.data() + kind.ready_at);
        args.next = cuda::upcoming(layout_, groups(next_layer, next, mode), choices[next].groups);
        cuda::launch_groups(*device_, *stream_, layout_, choices[i].groups, args);
        continue;
      }
      if (!kind.rows.empty()) {
        std::vector<cuda::RowsPart> parts;
        for (size_t part = 0; part < kind.rows.size(); ++part)
          parts.push_back({{&layout_, weights_.data() + layer * layer_bytes_ + kind.rows_at[part], kind.shapes[part].N,
                            kind.K, kind.params[part]},
                           nullptr,
                           outputs(layer, i) + kind.first_output[part]});
        cuda::launch_rows(*device_, *stream_, {parts, x});
        continue;
      }
      GemvArgs args;
      args.weights = columns(layer, i);
      args.inputs = mode == Mode::dense ? Inputs::dense : mode == Mode::collects ? Inputs::threshold : Inputs::list;
      args.x = x;
      args.threshold = kind.threshold;
      args.list = reinterpret_cast<int32_t*>(inputs_.data() + kind.list_at);
      args.count = reinterpret_cast<int32_t*>(inputs_.data() + kind.count_at);
      args.y = outputs(layer, i);
      args.zero = zero, args.zero_count = zero_count;
      args.workspace = workspace;
      if (mode == Mode::list_kernel)
        cuda::collect_active(*device_, *stream_, args.x, kind.K, nullptr, kind.threshold,
                             const_cast<int32_t*>(args.list), const_cast<int32_t*>(args.count));
      cuda::launch_gemv(*device_, *stream_, layout_, choices[i].columns, args);
    }
  }
}

double Bench::check(Mode mode, const std::vector<Choice>& choices) {
  const double tolerance = mode == Mode::int8 ? kInt8Tolerance : kTolerance;
  y_.fill(0xff);  // not numbers
  const std::vector<std::byte> zeros(size_t(4 * kinds_[0].outputs));
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
        const float* const y = all.data() + kind.y_at / 4 + kind.first_output[part];
        for (size_t n = 0; n < kind.expected[part].size(); ++n) {
          const double e = kind.expected[part][n], d = double(y[n]) - e;
          error += d * d;
          norm += e * e;
        }
      }
      const double deviation = std::sqrt(error / std::max(norm, 1e-30));
      if (!(deviation <= tolerance))
        throw Error("layer {}, {}: the kernel's result is off by {:.3g} of its size (at most {} allowed)", layer,
                    kind.name, deviation, tolerance);
      worst = std::max(worst, deviation);
    }
  }
  return worst;
}

double Bench::measure(Mode mode, const std::vector<Choice>& choices, int runs) {
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

std::vector<Choice> Bench::choices_for(Mode mode, size_t kind, const Choice& now) const {
  std::vector<Choice> out;
  if (layout_.family == Family::group_sparse) {
    for (const GroupsPlan& plan : cuda::kernel_candidates(device_->info(), layout_, groups(0, kind, mode), now.groups))
      out.push_back({{}, plan});
    for (const GroupsPlan& plan : cuda::early_candidates(now.groups)) out.push_back({{}, plan});
    return out;
  }
  if (layout_.family != Family::zigzag) return out;
  for (const GemvPlan& plan : cuda::kernel_candidates(device_->info(), layout_, columns(0, kind), now.columns))
    out.push_back({plan, {}});
  if (mode == Mode::dense) return out;
  for (const GemvPlan& plan : cuda::early_candidates(now.columns)) out.push_back({plan, {}});
  out.push_back({cuda::without_early_headers(now.columns), {}});
  return out;
}

std::vector<Choice> Bench::tune(Mode mode) {
  std::vector<Choice> best(kinds_.size());
  std::vector<std::vector<cuda::Candidates<Choice>>> stages(kinds_.size());
  for (size_t i = 0; i < kinds_.size(); ++i) {
    if (layout_.family == Family::zigzag)
      best[i].columns = cuda::default_plan(device_->info(), layout_, columns(0, i),
                                           mode == Mode::dense ? Inputs::dense : Inputs::threshold);
    if (layout_.family == Family::group_sparse) {
      GroupsPlan plan = cuda::default_plan(device_->info(), layout_, groups(0, i, mode));
      if (mode == Mode::slice) plan.split = cuda::Split::slice;
      if (mode == Mode::fma) plan = {8, 16, cuda::Split::stream, cuda::Math::fma, 0};
      best[i].groups = cuda::filled(device_->info(), groups(0, i, mode), plan);
    }
    stages[i].push_back([this, mode, i](const Choice& now) { return choices_for(mode, i, now); });
  }
  constexpr int kRuns = 3;
  cuda::search_plans(best, stages, [&](const std::vector<Choice>& choices) { return measure(mode, choices, kRuns); });
  return best;
}

BenchRow Bench::time(Mode mode, std::string& plans) {
  // Lists are read in the same way whoever makes them.
  const std::vector<Choice> choices = mode == Mode::list_kernel ? list_plans_ : tune(mode);
  if (mode == Mode::list) list_plans_ = choices;
  BenchRow row;
  row.bench = "linear";
  row.what = fmt::format("{} layers", n_layers_);
  if (mode == Mode::list) row.what += kListsReady;
  if (mode == Mode::list_kernel) row.what += kListKernels;
  if (mode == Mode::stream) row.what += kStream;
  if (mode == Mode::slice) row.what += kSlice;
  if (mode == Mode::ready) row.what += kInputsReady;
  if (mode == Mode::input_kernel) row.what += kInputKernels;
  if (mode == Mode::mma) row.what += kTensorCores;
  if (mode == Mode::fma) row.what += kMultiplyAdds;
  if (mode == Mode::int8) row.what += kEightBits;
  row.layout = layout_.name;
  if (layout_.family == Family::group_sparse) row.weight_sparsity = options_.weight_sparsity;
  row.deviation = check(mode, choices);
  double skipped = 0, all = 0;
  for (const Kind& kind : kinds_) {
    const double share = double(kind.active.size()) / double(kind.x.size());
    for (size_t i = 0; i < kind.shapes.size(); ++i) {
      const double bytes = double(layout_.size_bytes(kind.shapes[i], kind.params[i]));
      all += bytes;
      skipped += bytes * (1 - share);
    }
  }
  row.bytes = int64_t((all - skipped) * double(n_layers_));
  row.act_sparsity = skipped / all;
  for (size_t i = 0; i < kinds_.size(); ++i)
    plans += fmt::format("{}{}: {}", i == 0 ? "" : "; ", kinds_[i].name,
                         is_of_groups(mode)       ? describe(choices[i].groups)
                         : kinds_[i].rows.empty() ? describe(choices[i].columns)
                                                  : "rows");

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

std::vector<Mode> Bench::modes() const {
  if (layout_.family == Family::group_sparse) {
    std::vector<Mode> out = {Mode::stream, Mode::slice, Mode::int8};
    if (!kinds_[0].groups.quads.empty()) out.insert(out.end(), {Mode::mma, Mode::ready, Mode::input_kernel});
    if (layout_.bits == 3 || layout_.bits == 4) out.push_back(Mode::fma);
    return out;
  }
  if (options_.act_sparsity == 0) return {Mode::dense};
  return {Mode::collects, Mode::list, Mode::list_kernel};
}

CudaLinearResult Bench::run() {
  CudaLinearResult result;
  result.device = device_->info();
  result.ceiling_gb_s = cuda::measure_read_gb_s(*device_, *stream_, weights_);
  for (const Mode mode : modes()) result.rows.push_back(time(mode, result.plans.emplace_back()));
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

CudaLinearResult bench_cuda_linear(const model::LinearLayers& layers, ThreadPool& pool,
                                   const CudaLinearOptions& options) {
  return Bench(layers, pool, options).run();
}

}  // namespace lacuna::eval
