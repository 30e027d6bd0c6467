#include "eval/cuda_spqt.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/rng.h"
#include "kernels/cuda/active.h"
#include "kernels/cuda/baselines.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/plan_search.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda/rows.h"
#include "layout/fallback.h"
#include "model/synth.h"

namespace lacuna::eval {
namespace {

using Kind = GemvVariant::Kind;
using kernels::WeightView;

constexpr int64_t kLeastCopies = 8, kMostCopies = 256;

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// One matrix in all the forms that the variants read, each several times in memory, and an input.
class Gemv {
 public:
  Gemv(layout::Shape shape, cuda::Device& device, cuda::Stream& stream, ThreadPool& pool)
      : shape_(shape), device_(device), stream_(stream), outputs_(padded(shape.N, 256)) {
    const layout::Layout& row_layout = layout::get(layout::fitting_layout(layout::Id::q4_K, shape.K));
    rows_ = make(row_layout, pool);
    zigzag_ = make(layout::get(layout::Id::zz4_k), pool);
    const int64_t cold = 4 * device.info().cache_bytes, bytes = int64_t(zigzag_.view.bytes.size());
    copies_ = std::clamp((cold + bytes - 1) / std::max<int64_t>(1, bytes), kLeastCopies, kMostCopies);

    const cuda::PreparedGroup prepared = cuda::prepare_group({&zigzag_.view, 1}, pool);
    codes_ = repeat(prepared.codes.bytes());
    headers_ = repeat(prepared.headers.bytes());
    super_rows_ = prepared.rows;
    HugeBuffer in_planes(size_t(shape.N * cuda::row_places(row_layout, shape.K).row_bytes));
    cuda::prepare_rows(row_layout, shape, {}, rows_.view.bytes, pool, in_planes.data());
    planes_ = repeat(in_planes.bytes());
    if (row_layout.id == layout::Id::q4_K) canonical_ = repeat(rows_.view.bytes);

    Rng rng(uint64_t(shape.K) * 7919);
    x_.resize(size_t(shape.K));
    for (float& x : x_) x = float(rng.normal());
    sizes_ = x_;
    for (float& x : sizes_) x = std::fabs(x);
    std::sort(sizes_.begin(), sizes_.end());
    x_there_ = cuda::Buffer(device, shape.K * int64_t(sizeof(float)), "inputs");
    x_there_.upload(std::as_bytes(std::span(x_)));
    list_ = cuda::Buffer(device, shape.K * int64_t(sizeof(int32_t)), "lists");
    count_ = cuda::Buffer(device, sizeof(int32_t), "lists");
    y_ = cuda::Buffer(device, copies_ * outputs_ * int64_t(sizeof(float)), "outputs");
  }

  const WeightView& weight(Kind kind) const { return is_rows(kind) ? rows_.view : zigzag_.view; }
  cuda::Columns columns(int64_t copy) const { return {codes_.at(copy), headers_.at(copy), super_rows_, shape_.K}; }

  /// Share of the inputs that are left out.
  double sparsity(double level) const { return level > 0 ? 1 - double(active_of(level).size()) / double(shape_.K) : 0; }

  /// All copies, one launch after the other; each clears what the next one adds to. keep_first: but the last one.
  void launch(const GemvVariant& variant, const cuda::GemvPlan& plan, bool keep_first = false) {
    for (int64_t copy = 0; copy < copies_; ++copy) {
      const bool last = copy + 1 == copies_;
      launch(variant, plan, copy, last && keep_first ? nullptr : y_at(last ? 0 : copy + 1));
    }
  }

  /// Milliseconds of one product: the recorded copies' time by their number.
  double time(cuda::Graph& graph) {
    watch_.start(stream_);
    graph.launch(stream_);
    return watch_.stop_ms(stream_) / double(copies_);
  }

  /// The fastest of the plans there are for the variant.
  cuda::GemvPlan tune(const GemvVariant& variant) {
    const layout::Layout& layout = *zigzag_.view.layout;
    const bool sparse = variant.kind == Kind::sparse;
    const cuda::GemvPlan best =
        cuda::default_plan(device_.info(), layout, columns(0), sparse ? cuda::Inputs::threshold : cuda::Inputs::dense);
    if (is_rows(variant.kind) || variant.kind == Kind::columns) return best;
    std::vector<cuda::Candidates<cuda::GemvPlan>> stages = {[&](const cuda::GemvPlan& now) {
      auto plans = cuda::kernel_candidates(device_.info(), layout, columns(0), now);
      const cuda::GemvPlan& first = cuda::kernel_plans(layout)[0];
      if (variant.kind == Kind::unbalanced)  // which looks at segments only
        std::erase_if(plans, [&](const cuda::GemvPlan& plan) {
          return plan.warps != first.warps || plan.chunk != first.chunk || plan.resident != first.resident;
        });
      return plans;
    }};
    if (sparse) stages.emplace_back([](const cuda::GemvPlan& now) { return cuda::early_candidates(now); });
    std::vector<cuda::GemvPlan> plans = {best};
    cuda::search_plans(plans, {stages},
                       [&](const std::vector<cuda::GemvPlan>& tried) { return measure(variant, tried[0]); },
                       {.rounds = 1, .noise = 0});
    return plans[0];
  }

  /// Relative error of the first and the last copy's products; throws where it is too large.
  double check(const GemvVariant& variant, const cuda::GemvPlan& plan) {
    y_.fill(0xff);  // not numbers
    const std::vector<std::byte> zeros(size_t(outputs_) * sizeof(float));
    y_.upload(zeros);  // the others are cleared by the launch before
    launch(variant, plan, true);
    stream_.synchronize();
    const std::vector<int32_t> active = active_of(variant.level);
    kernels::Activation input{x_.data(), 1, shape_.K};
    input.active = active.data();
    input.active_count = int64_t(active.size());
    std::vector<float> result(static_cast<size_t>(shape_.N));
    double worst = 0;
    for (const int64_t copy : {int64_t{0}, copies_ - 1}) {
      y_.download(std::as_writable_bytes(std::span(result)), copy * outputs_ * int64_t(sizeof(float)));
      worst = std::max(worst, check_result(weight(variant.kind), input, result.data()));
    }
    return worst;
  }

 private:
  struct Matrix {
    HugeBuffer bytes;
    WeightView view;
  };
  struct Copies {
    cuda::Buffer buffer;
    int64_t step = 0;
    const std::byte* at(int64_t copy) const { return buffer.data() + copy * step; }
  };

  static bool is_rows(Kind kind) { return kind == Kind::rows || kind == Kind::skipping_rows; }

  Matrix make(const layout::Layout& layout, ThreadPool& pool) const {
    Matrix out;
    out.bytes = model::random_matrix(layout, shape_, {}, 1, pool);
    out.view = {std::string(layout.name), &layout, shape_, out.bytes.bytes()};
    return out;
  }
  Copies repeat(std::span<const std::byte> bytes) {
    Copies out;
    out.step = padded(int64_t(bytes.size()), 256);
    out.buffer = cuda::Buffer(device_, out.step * copies_, "weights");
    out.buffer.upload(bytes);
    for (int64_t copy = 1; copy < copies_; ++copy) out.buffer.copy_within(0, copy * out.step, int64_t(bytes.size()));
    return out;
  }
  float* y_at(int64_t copy) const { return y_.as<float>() + copy * outputs_; }
  float threshold_of(double level) const {
    return level > 0 ? sizes_[size_t(std::clamp<int64_t>(std::llround(level * double(shape_.K)), 0, shape_.K - 1))] : 0;
  }
  std::vector<int32_t> active_of(double level) const {
    const float threshold = threshold_of(level);
    std::vector<int32_t> out;
    for (int64_t k = 0; k < shape_.K; ++k)
      if (!(std::fabs(x_[size_t(k)]) < threshold)) out.push_back(int32_t(k));
    return out;
  }

  void launch(const GemvVariant& variant, const cuda::GemvPlan& plan, int64_t copy, float* clear) {
    const auto* const x = x_there_.as<float>();
    const float threshold = threshold_of(variant.level);
    if (variant.kind == Kind::rows) {
      const cuda::RowsPart part = {{rows_.view.layout, planes_.at(copy), shape_.N, shape_.K}, nullptr, y_at(copy)};
      cuda::launch_rows(device_, stream_, {{&part, 1}, x});
      return;
    }
    if (variant.kind == Kind::skipping_rows) {
      cuda::launch_skipping_rows(device_, stream_, {canonical_.at(copy), shape_.N, shape_.K, x, threshold, y_at(copy)});
      return;
    }
    cuda::GemvArgs args;
    args.weights = columns(copy);
    args.inputs = variant.kind == Kind::sparse ? cuda::Inputs::threshold : cuda::Inputs::dense;
    args.x = x;
    args.threshold = threshold;
    args.y = y_at(copy);
    args.zero = clear;
    args.zero_count = clear == nullptr ? 0 : outputs_;
    if (variant.kind == Kind::unbalanced) {
      cuda::launch_unbalanced(device_, stream_, plan.segments, args);
    } else if (variant.kind == Kind::columns) {
      cuda::collect_active(device_, stream_, x, shape_.K, nullptr, threshold, list_.as<int32_t>(),
                           count_.as<int32_t>());
      args.list = list_.as<int32_t>();
      args.count = count_.as<int32_t>();
      cuda::launch_column_parallel(device_, stream_, args);
    } else {
      cuda::launch_gemv(device_, stream_, *zigzag_.view.layout, plan, args);
    }
  }

  double measure(const GemvVariant& variant, const cuda::GemvPlan& plan) {
    cuda::Graph graph(stream_, [&] { launch(variant, plan); });
    time(graph);
    return std::min(time(graph), time(graph));
  }

  layout::Shape shape_;
  cuda::Device& device_;
  cuda::Stream& stream_;
  int64_t outputs_, copies_ = 1, super_rows_ = 0;
  Matrix rows_, zigzag_;
  Copies codes_, headers_, planes_, canonical_;
  std::vector<float> x_, sizes_;  // sizes: |x|, ascending
  cuda::Buffer x_there_, list_, count_, y_;
  cuda::Stopwatch watch_;
};

}  // namespace

CudaGemvBench::CudaGemvBench(cuda::Device& device, ThreadPool& pool, int runs)
    : device_(device), pool_(pool), runs_(runs), stream_(std::make_unique<cuda::Stream>(device)) {}
CudaGemvBench::~CudaGemvBench() = default;

std::vector<GemvRow> CudaGemvBench::run(const std::string& name, layout::Shape shape,
                                        std::span<const GemvVariant> variants) {
  std::vector<GemvVariant> wanted;
  for (const GemvVariant& variant : variants)
    if (variant.kind != Kind::skipping_rows || shape.K % 256 == 0) wanted.push_back(variant);
  Gemv gemv(shape, device_, *stream_, pool_);
  std::vector<GemvRow> out;
  std::vector<cuda::GemvPlan> plans;
  std::vector<std::unique_ptr<cuda::Graph>> graphs;
  for (const GemvVariant& variant : wanted) {
    plans.push_back(gemv.tune(variant));
    out.push_back(describe_product(name, variant, gemv.weight(variant.kind), gemv.sparsity(variant.level)));
    out.back().row.deviation = gemv.check(variant, plans.back());
    graphs.push_back(std::make_unique<cuda::Graph>(*stream_, [&] { gemv.launch(variant, plans.back()); }));
    gemv.time(*graphs.back());
  }
  std::vector<std::vector<double>> times(wanted.size());
  for (int round = 0; round < runs_; ++round) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      const size_t v = (i + size_t(round)) % wanted.size();
      times[v].push_back(gemv.time(*graphs[v]));
    }
  }
  for (size_t v = 0; v < wanted.size(); ++v)
    out[v].row.deviation = std::max(out[v].row.deviation, gemv.check(wanted[v], plans[v]));
  set_rounds(out, times);
  return out;
}

}  // namespace lacuna::eval
