#include "cli/spqt.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/say.h"
#include "eval/bandwidth.h"
#include "eval/cuda_spqt.h"
#include "io/atomic_file.h"
#include "model/shapes.h"
#include "model/weight_groups.h"

namespace lacuna::cli {
namespace {

using Kind = eval::GemvVariant::Kind;

// The models and sizes of the paper.
constexpr const char* kEndToEnd[] = {"llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b"};
constexpr const char* kGemv[] = {"llama-3-8b", "llama-2-13b", "llama-2-70b"};
constexpr int64_t kSweepOutputs[] = {2048, 4096, 8192};
constexpr int64_t kSweepInputs[] = {1024, 2048, 4096, 8192, 16384};
constexpr double kLevels[] = {0.25, 0.4, 0.5};
constexpr double kCompared = 0.5;  // of the figures that compare baselines

constexpr eval::GemvVariant kRows{Kind::rows}, kDense{Kind::zigzag}, kSparse{Kind::sparse, kCompared},
    kB1{Kind::skipping_rows, kCompared}, kB2{Kind::unbalanced, kCompared}, kColumns{Kind::columns, kCompared};

bool with_model(const SpqtRequest& request) { return !request.model.empty() || !request.synthetic.empty(); }

bool asked(const SpqtRequest& request, const char* part) {
  if (request.parts.empty()) return part != std::string("table2") || with_model(request);
  return std::find(request.parts.begin(), request.parts.end(), part) != request.parts.end();
}

void add(SpqtReport& report, const char* part, const std::string& group, const eval::GemvRow& row) {
  report.add({part, group, row.variant.name(), row.row, row.gflops, row.speedup, ""});
}

/// The matrices that read one input of a layer of a model file.
std::vector<eval::NamedShape> layer_shapes(const io::Checkpoint& checkpoint) {
  std::vector<eval::NamedShape> out;
  for (const model::WeightGroup& group : model::layer_groups(checkpoint, 0)) {
    eval::NamedShape& shape = out.emplace_back();
    shape.name = group.name;
    shape.shape.K = group.parts[0].shape.K;
    for (const kernels::WeightView& part : group.parts) shape.shape.N += part.shape.N;
  }
  return out;
}

bool on_cuda(const SpqtRequest& request) { return request.common.device == "cuda"; }

void report_linear_layers(const std::string& name, std::span<const eval::NamedShape> shapes, int64_t layers,
                          eval::ProductBench& bench, SpqtReport& report) {
  static constexpr eval::GemvVariant kVariants[] = {kRows, kDense, kB1, kB2, kSparse};
  std::vector<std::vector<eval::GemvRow>> products;
  for (const eval::NamedShape& shape : shapes) products.push_back(bench.run(shape.name, shape.shape, kVariants));
  for (const eval::GemvRow& row : eval::add_up(name, products, layers)) add(report, "fig7", name, row);
}

void report_figure_7(const SpqtRequest& request, eval::ProductBench& bench, SpqtReport& report) {
  if (!request.model.empty()) {
    const io::Checkpoint checkpoint = open_weights(request.model, request.common);
    const std::string name = std::filesystem::path(request.model).lexically_normal().filename().string();
    report_linear_layers(name, layer_shapes(checkpoint), model::layer_count(checkpoint), bench, report);
    return;
  }
  std::vector<std::string> names(std::begin(kEndToEnd), std::end(kEndToEnd));
  if (!request.synthetic.empty()) names = {request.synthetic};
  for (const std::string& name : names) {
    const model::ModelShape& shape = model::find_shape(name);
    report_linear_layers(name, eval::layer_shapes(shape), request.n_layers > 0 ? request.n_layers : shape.n_layers,
                         bench, report);
  }
}

/// Figures 8 and 9 are views of the same rounds.
void report_figures_8_9(const SpqtRequest& request, eval::ProductBench& bench, SpqtReport& report) {
  const bool latency = asked(request, "fig8"), baselines = asked(request, "fig9");
  std::vector<eval::GemvVariant> variants = {kRows, kDense};
  for (const double level : kLevels)
    if (latency || level == kCompared) variants.push_back({Kind::sparse, level});
  if (baselines) variants.insert(variants.end(), {kB1, kB2});
  if (baselines && on_cuda(request)) variants.push_back(kColumns);
  std::vector<std::pair<std::string, eval::GemvRow>> compared;
  for (const char* name : kGemv) {
    for (const eval::NamedShape& shape : eval::matrix_shapes(model::find_shape(name))) {
      const std::string group = fmt::format("{} {} {} x {}", name, shape.name, shape.shape.N, shape.shape.K);
      for (const eval::GemvRow& row : bench.run(group, shape.shape, variants)) {
        const bool baseline = row.variant == kB1 || row.variant == kB2 || row.variant == kColumns;
        if (latency && !baseline) add(report, "fig8", group, row);
        if (baseline || row.variant == kRows || row.variant == kSparse) compared.emplace_back(group, row);
      }
    }
  }
  if (baselines)
    for (const auto& [group, row] : compared) add(report, "fig9", group, row);
}

void report_figure_10(eval::ProductBench& bench, SpqtReport& report) {
  static constexpr eval::GemvVariant kVariants[] = {kRows, kDense};
  for (const int64_t n : kSweepOutputs)
    for (const int64_t k : kSweepInputs) {
      const std::string group = fmt::format("{} x {}", n, k);
      for (const eval::GemvRow& row : bench.run(group, {n, k}, kVariants)) add(report, "fig10", group, row);
    }
}

}  // namespace

std::vector<std::string> spqt_parts() { return {"table2", "fig7", "fig8", "fig9", "fig10"}; }

void check_spqt(const SpqtRequest& request) {
  if (asked(request, "table2") && !with_model(request))
    throw Error("--parts table2 decodes with a model: give MODEL or --synthetic SHAPE");
  if (!asked(request, "table2"))
    for (const auto& [flag, given] : {std::pair{"--thresholds", !request.sparsity.thresholds.empty()},
                                      {"--criterion", !request.sparsity.criterion.empty()}})
      if (given) throw Error("{} is of table2, which is not asked for; leave it out", flag);
  if (!request.model.empty()) open_weights(request.model, request.common);
  if (!request.synthetic.empty()) model::find_shape(request.synthetic);
  if (!request.svg.empty() && !request.svg.ends_with(".svg"))
    throw Error("--svg {}: the name must end in .svg", request.svg);
}

int run_spqt(const SpqtRequest& request) {
  std::optional<cuda::Device> device;
  SpqtMachine machine;
  if (on_cuda(request)) {
    device.emplace(request.gpu.options());
    machine.gpu = fmt::format("{}, driver for CUDA {}", device->info().name, device->info().driver);
    machine.ceiling_gb_s = cuda::measure_read_gb_s(*device);
  } else {
    machine.ceiling_gb_s = request.ceiling_gb_s;
    machine.clock_ghz = eval::measure_clock_ghz();
  }
  SpqtReport report(request.common, std::move(machine));
  if (asked(request, "table2")) report_decoding(request, report);
  {
    ThreadPool pool(request.common.threads);
    std::unique_ptr<eval::ProductBench> bench;
    if (device)
      bench = std::make_unique<eval::CudaGemvBench>(*device, pool, request.runs);
    else
      bench = std::make_unique<eval::GemvBench>(pool, eval::GemvOptions{.runs = request.runs, .plans = request.plans});
    if (asked(request, "fig7")) report_figure_7(request, *bench, report);
    if (asked(request, "fig8") || asked(request, "fig9")) report_figures_8_9(request, *bench, report);
    if (asked(request, "fig10")) report_figure_10(*bench, report);
  }
  if (!request.svg.empty()) io::write_file_atomically(request.svg, report.svg());
  return 0;
}

}  // namespace lacuna::cli
