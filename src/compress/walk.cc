#include "compress/walk.h"

#include <c10/core/GradMode.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>

#include "compress/e2e.h"
#include "compress/hidden_states.h"
#include "core/error.h"
#include "core/mapped_file.h"
#include "core/progress.h"
#include "core/sha256.h"
#include "io/atomic_file.h"
#include "solver/check.h"
#include "solver/project.h"
#include "solver/solve.h"

namespace lacuna::compress {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Of every tensor's name and bytes.
std::string digest_of(const io::Checkpoint& checkpoint) {
  std::string all;
  for (const io::Tensor& tensor : checkpoint.tensors())
    all += fmt::format("{} {}\n", tensor.name, sha256_hex(tensor.bytes));
  return sha256_hex(std::as_bytes(std::span(all)));
}

/// What two runs must share so that one may go on with the other's layers.
Json settings_of(const io::Checkpoint& checkpoint, const Samples& samples, const WalkOptions& options) {
  return {{"method", options.method},
          {"bits", options.grid.bits},
          {"group_size", options.grid.group_size},
          {"symmetric", options.grid.symmetric},
          {"pattern", int(options.pattern.kind)},
          {"sparsity", options.pattern.sparsity},
          {"n", options.pattern.n},
          {"m", options.pattern.m},
          {"group", options.pattern.group},
          {"layout", options.layout},
          {"inputs", options.inputs == Inputs::compressed ? "compressed" : "dense"},
          {"token_clip", options.tokens.clip},
          {"first_weight", options.tokens.first},
          {"damping", options.solving.damping},
          {"order", int(options.solving.order)},
          {"ranges", options.solving.search_ranges ? "searched" : "whole"},
          {"omniquant_epochs", options.omniquant.epochs},
          {"omniquant_lr", options.omniquant.lr},
          {"omniquant_batch", options.omniquant.batch},
          {"bqpo_epochs", options.bqpo.epochs},
          {"bqpo_lr", options.bqpo.lr},
          {"bqpo_batch", options.bqpo.batch},
          {"seed", options.seed},
          {"device", options.device.str()},
          {"threads", options.threads},
          {"windows", samples.first},
          {"seq_len", samples.seq_len},
          {"calibration", options.calibration_sha256},
          {"model", digest_of(checkpoint)}};
}

std::string text_of(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

constexpr const char *kSettings = "settings.json", *kRanges = "omniquant", *kBlocks = "bqpo";  // stages of training

void open_work_folder(const io::Checkpoint& checkpoint, const Samples& samples, const WalkOptions& options) {
  std::filesystem::create_directories(options.work_folder);
  const std::string path = options.work_folder + "/" + kSettings;
  const Json settings = settings_of(checkpoint, samples, options);
  if (!std::filesystem::exists(path)) {
    if (!std::filesystem::is_empty(options.work_folder))
      throw Error("{}: holds files, but no {} of a run that was stopped; name another folder with --work",
                  options.work_folder, kSettings);
    return io::write_file_atomically(path, settings.dump(1) + "\n");
  }
  const Json found = io::parse_json_object(text_of(path), path);
  for (const auto& [key, value] : settings.items())
    if (!found.contains(key) || found[key] != value)
      throw Error(
          "{}: belongs to a run with another {} ({}, now {}); remove the folder or name another one with --work",
          options.work_folder, key, found.contains(key) ? found[key].dump() : "none", value.dump());
}

double relative_loss(const at::Tensor& W, const at::Tensor& theta, const at::Tensor& C) {
  const double whole = solver::loss(W, at::zeros_like(W), C);
  return whole > 0 ? solver::loss(W, theta, C) / whole : 0;
}

/// What every method starts from: weights of the least magnitude dropped, the rest rounded to nearest.
at::Tensor plain_solution(const solver::Problem& problem) {
  const at::Tensor keep = solver::keep_mask(problem.W.abs(), problem.pattern);
  at::Tensor pruned = solver::masked(problem.W, keep);
  if (problem.grid.bits == 0) return pruned;
  const solver::Affine affine = solver::fit_grid(pruned, problem.grid);
  return solver::masked(solver::decode(solver::round_to_grid(pruned, problem.grid, affine), problem.grid), keep);
}

/// What an input's statistics are once the columns of its readers are multiplied with `scale`, undefined: with 1. No
/// further scale is to be searched, which means that all inputs are alike.
solver::Statistics after_folding(const solver::Statistics& statistics, const at::Tensor& scale) {
  const at::Tensor& C = statistics.second_moment;
  return {scale.defined() ? C / scale.unsqueeze(1) / scale : C, at::ones_like(statistics.mean_abs), statistics.tokens};
}

/// Input scales (AWQ) folded into what makes each input, so that the layer computes the same as before: its norm, or
/// the rows of v (where every head has a key of its own) and of up. Inputs that nothing can take a scale for keep 1.
/// Returns the scale of each input, undefined where it is 1.
std::array<at::Tensor, model::kInputs> fold_input_scales(
    const model::Config& config, Layer& layer, const std::array<solver::Statistics, model::kInputs>& statistics,
    const WalkOptions& options) {
  using model::Matrix;
  std::array<at::Tensor, model::kInputs> scales;
  for (size_t i = 0; i < scales.size(); ++i) {
    const auto input = model::Input(i);
    const bool from_norm = input == model::Input::attn_in || input == model::Input::ffn_in;
    if (from_norm && !config.norm_first) continue;
    if (input == model::Input::attn_out && config.n_heads != config.n_kv_heads) continue;
    std::vector<at::Tensor> readers;
    for (size_t m = 0; m < size_t(model::kMatrices); ++m)
      if (model::input_of(Matrix(m)) == input && layer.weight[m].defined()) readers.push_back(layer.weight[m]);
    const solver::Problem problem{.W = at::cat(readers),
                                  .stats = statistics[i],
                                  .grid = options.grid,
                                  .pattern = options.pattern,
                                  .options = options.solving};
    scales[i] = solver::input_scale(solver::method(options.method), problem);
  }
  // All are searched on the layer as it was.
  for (size_t i = 0; i < scales.size(); ++i) {
    const at::Tensor& scale = scales[i];
    if (!scale.defined()) continue;
    for (size_t m = 0; m < size_t(model::kMatrices); ++m)
      if (model::input_of(Matrix(m)) == model::Input(i) && layer.weight[m].defined())
        layer.weight[m] = layer.weight[m] * scale;
    const auto divide_rows = [&](Matrix m) {
      layer.weight[size_t(m)] = layer.weight[size_t(m)] / scale.unsqueeze(1);
      if (layer.bias[size_t(m)].defined()) layer.bias[size_t(m)] = layer.bias[size_t(m)] / scale;
    };
    const auto divide_norm = [&](Norm& norm) {
      norm.weight = norm.weight / scale;
      if (norm.bias.defined()) norm.bias = norm.bias / scale;
    };
    switch (model::Input(i)) {
      case model::Input::attn_in:
        divide_norm(layer.attn_norm);
        break;
      case model::Input::attn_out:
        divide_rows(Matrix::v);
        break;
      case model::Input::ffn_in:
        divide_norm(layer.ffn_norm);
        break;
      case model::Input::ffn_down:
        divide_rows(Matrix::up);
        break;
    }
  }
  return scales;
}

/// A matrix on its way from the solver to the file.
struct Solving {
  MatrixReport report;
  solver::Problem problem;  // as it was solved, scales folded in
};

/// W: as the checkpoint holds it; weight: the same with scales folded in.
Solving solve_matrix(const std::string& name, const at::Tensor& W, const solver::Statistics& statistics,
                     const at::Tensor& weight, const at::Tensor& scale, const WalkOptions& options,
                     solver::Solution& solution) {
  const auto start = Clock::now();
  Solving out;
  out.problem = {
      .W = W, .stats = statistics, .grid = options.grid, .pattern = options.pattern, .options = options.solving};
  out.report.name = name;
  if (options.on_problem) options.on_problem(name, out.problem);
  out.report.loss_before = relative_loss(W, plain_solution(out.problem), statistics.second_moment);
  out.problem.W = weight;
  out.problem.stats = after_folding(statistics, scale);
  solution = solver::solve(options.method, out.problem);
  out.report.iterations = solution.iterations;
  out.report.curve = solution.curve;
  out.report.seconds = seconds_since(start);
  return out;
}

/// Packs a solution and completes its report; `weight` becomes what is stored.
MatrixReport pack_matrix(const Solving& solved, const solver::Solution& solution, at::Tensor& weight,
                         const WalkOptions& options, const layout::Layout& layout, std::vector<PackedTensor>& out) {
  const auto start = Clock::now();
  MatrixReport report = solved.report;
  out.push_back(pack(report.name, solution, layout, options.grid));
  const at::Tensor& target = solved.problem.W;
  weight = unpack(out.back()).to(target.device());
  report.layout = layout.name;
  report.N = target.size(0);
  report.K = target.size(1);
  report.loss = relative_loss(target, weight, solved.problem.stats.second_moment.to(target.device()));
  if (solution.keep.defined())
    report.sparsity = 1 - double(solution.keep.sum().item<int64_t>()) / double(solution.keep.numel());
  report.bytes = int64_t(out.back().bytes.size());
  report.bits = 8.0 * double(report.bytes) / double(target.numel());
  report.seconds += seconds_since(start);
  return report;
}

const layout::Layout& chosen_layout(const WalkOptions& options) {
  if (options.layout == "auto") return automatic_layout(options.grid, options.pattern);
  const layout::Layout* found = layout::find(options.layout);
  if (found == nullptr) throw Error("--layout {}: unknown; known are auto, {}", options.layout, layout::known_names());
  return *found;
}

/// Throws Error before any work where a matrix does not fit the layout's blocks.
void check_shapes(const io::Checkpoint& checkpoint, int64_t layers, const layout::Layout& layout) {
  for (int64_t index = 0; index < layers; ++index)
    for (size_t m = 0; m < size_t(model::kMatrices); ++m) {
      const io::Tensor* tensor = checkpoint.find(model::tensor_name(index, model::Matrix(m)) + ".weight");
      if (tensor != nullptr && layout.block_cols > 1 && tensor->shape.K % layout.block_cols != 0)
        throw Error("{}: has {} inputs, {} stores blocks of {}; leave --layout out, the automatic one holds any shape",
                    tensor->name, tensor->shape.K, layout.name, layout.block_cols);
    }
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor*>> vectors_of(Layer& layer, int64_t index) {
  const auto bias = [&](model::Matrix m) {
    return std::pair{model::tensor_name(index, m) + ".bias", &layer.bias[size_t(m)]};
  };
  return {{fmt::format("blk.{}.attn_norm.weight", index), &layer.attn_norm.weight},
          {fmt::format("blk.{}.attn_norm.bias", index), &layer.attn_norm.bias},
          {fmt::format("blk.{}.ffn_norm.weight", index), &layer.ffn_norm.weight},
          {fmt::format("blk.{}.ffn_norm.bias", index), &layer.ffn_norm.bias},
          bias(model::Matrix::v),
          bias(model::Matrix::up)};
}

void check(const WalkOptions& options) {
  solver::check_request(solver::method(options.method), options.grid, options.pattern);
  check_layout(chosen_layout(options), options.grid, options.pattern);
}

Json LayerReport::json() const {
  return {{"layer", layer},
          {stage,
           {{"before", training.before},
            {"after", training.after},
            {"epochs", training.epochs},
            {"kept", training.kept},
            {"seconds", training.seconds},
            {"device_memory_bytes", training.device_bytes}}}};
}

LayerReport LayerReport::from_json(const Json& json) {
  const std::string stage = json.contains(kBlocks) ? kBlocks : kRanges;
  const Json& one = json.at(stage);
  return {json.at("layer"),
          stage,
          {one.at("before"), one.at("after"), one.at("epochs"), one.at("kept"), one.at("seconds"),
           one.value("device_memory_bytes", int64_t{0})}};
}

Json MatrixReport::json() const {
  return {{"tensor", name},
          {"layout", layout},
          {"n", N},
          {"k", K},
          {"loss_before", loss_before},
          {"loss", loss},
          {"sparsity", sparsity},
          {"bits", bits},
          {"bytes", bytes},
          {"outlier_share", outlier_share},
          {"iterations", iterations},
          {"seconds", seconds},
          {"curve", curve}};
}

MatrixReport MatrixReport::from_json(const Json& json) {
  return {json.at("tensor"),     json.at("layout"),   json.at("n"),    json.at("k"),     json.at("loss_before"),
          json.at("loss"),       json.at("sparsity"), json.at("bits"), json.at("bytes"), json.at("outlier_share"),
          json.at("iterations"), json.at("seconds"),  json.at("curve")};
}

void remove_work(const std::string& work_folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::remove_all(tuned_folder(work_folder), ignored);
  for (const char* name : {kSettings, "hidden", "teacher", "e2e.pt"}) fs::remove(work_folder + "/" + name, ignored);
  for (int64_t layer = 0; fs::remove(layer_path(work_folder, layer), ignored); ++layer)
    fs::remove(solutions_path(work_folder, layer), ignored);
  fs::remove(work_folder, ignored);  // where it is empty
}

std::string layer_path(const std::string& work_folder, int64_t layer) {
  return fmt::format("{}/layer-{:04}.gguf", work_folder, layer);
}

WalkReport walk(const io::Checkpoint& checkpoint, std::span<const int32_t> ids, const Samples& samples,
                const WalkOptions& options, const std::function<void(const MatrixReport&)>& on_matrix,
                const std::function<void(const LayerReport&)>& on_layer) {
  const auto start = Clock::now();
  const c10::NoGradGuard no_grad;
  check(options);
  const layout::Layout& layout = chosen_layout(options);
  use_threads(options.threads);
  ThreadPool pool(options.threads);
  const Net net(checkpoint, options.device, &pool);
  const int64_t layers = net.config().n_layers;
  check_shapes(checkpoint, layers, layout);
  open_work_folder(checkpoint, samples, options);
  const auto file_of = [&](const char* name) {
    return options.hidden_on_disk ? options.work_folder + "/" + name : std::string();
  };
  HiddenStates hidden(net, ids, samples, file_of("hidden"));
  const bool learns_ranges = solver::method(options.method).learns_ranges && options.omniquant.epochs > 0,
             trains_weights = options.bqpo.epochs > 0, trains = learns_ranges || trains_weights;
  std::optional<HiddenStates> teacher;  // what the dense layers give
  if (trains) teacher.emplace(net, ids, samples, file_of("teacher"));

  WalkReport report;
  std::optional<Progress> progress;
  // A window costs about as much in each of the two passes; solving is counted as one pass more.
  const int64_t passes =
      3 + (learns_ranges ? options.omniquant.epochs + 2 : 0) + (trains_weights ? options.bqpo.epochs + 2 : 0);
  if (options.progress) progress.emplace("Compressing", layers * passes * hidden.windows(), "windows");
  const auto step = [&](int64_t windows) {
    if (progress) progress->add(windows);
  };
  const bool dense_inputs = options.inputs == Inputs::dense;
  for (int64_t index = 0; index < layers; ++index) {
    const std::string path = layer_path(options.work_folder, index);
    Layer layer = net.load_layer(index);
    const Layer dense = layer;
    const bool last = index + 1 == layers;
    // The next layer's inputs can replace this one's while its statistics are gathered, where no training needs them.
    const bool ahead = dense_inputs && !trains && !last;
    if (trains)
      for (int64_t w = 0; w < teacher->windows(); ++w) teacher->set(w, net.forward(dense, teacher->get(w)), index);
    if (std::filesystem::exists(path) &&
        (!options.keep_solutions || std::filesystem::exists(solutions_path(options.work_folder, index)))) {
      const PackedLayer packed = read_layer(path);
      for (const PackedTensor& tensor : packed.tensors) {
        for (size_t m = 0; m < size_t(model::kMatrices); ++m)
          if (tensor.name == model::tensor_name(index, model::Matrix(m)) + ".weight")
            layer.weight[m] = unpack(tensor).to(options.device);
        for (const auto& [name, vector] : vectors_of(layer, index))
          if (tensor.name == name) *vector = unpack(tensor).to(options.device);
      }
      for (const Json& row : io::parse_json(packed.report, path)) {
        if (!row.contains("tensor")) {
          report.layers.push_back(LayerReport::from_json(row));
          if (on_layer) on_layer(report.layers.back());
          continue;
        }
        report.matrices.push_back(MatrixReport::from_json(row));
        if (on_matrix) on_matrix(report.matrices.back());
      }
      ++report.resumed_layers;
      step((passes - 1) * hidden.windows());
    } else {
      StatisticsSums sums(options.tokens);
      const auto add = [&](model::Input input, const at::Tensor& x) { sums.add(input, x); };
      for (int64_t w = 0; w < hidden.windows(); ++w, step(1)) {
        if (ahead) {
          hidden.set(w, net.forward(dense, hidden.get(w), add), index);
        } else {
          net.inputs(dense, hidden.get(w), add);
        }
      }
      auto statistics = sums.finish(index);
      PackedLayer packed;
      std::array<at::Tensor, model::kInputs> scales;
      if (solver::method(options.method).input_scale != nullptr) {
        scales = fold_input_scales(net.config(), layer, statistics, options);
        for (const auto& [name, vector] : vectors_of(layer, index))
          if (vector->defined()) packed.tensors.push_back(pack_vector(name, *vector));
      }
      Json rows = Json::array();
      std::array<Solving, model::kMatrices> solved;
      std::array<solver::Solution, model::kMatrices> solutions;
      const auto input_of = [](size_t m) { return size_t(model::input_of(model::Matrix(m))); };
      for (size_t m = 0; m < solved.size(); ++m) {
        if (!layer.weight[m].defined()) continue;
        solved[m] = solve_matrix(model::tensor_name(index, model::Matrix(m)) + ".weight", dense.weight[m],
                                 statistics[input_of(m)], layer.weight[m], scales[input_of(m)], options, solutions[m]);
      }
      if (trains) {  // which needs the device's memory, and no statistics
        statistics = {};
        std::map<const void*, at::Tensor> on_host;  // matrices of one input share a moment
        for (Solving& one : solved) {
          if (!one.problem.W.defined()) continue;
          at::Tensor& moment = one.problem.stats.second_moment;
          at::Tensor& moved = on_host[moment.data_ptr()];
          if (!moved.defined()) moved = moment.to(at::kCPU);
          moment = moved;
        }
      }
      const Block block{.net = net,
                        .layer = layer,
                        .grid = options.grid,
                        .tokens = options.tokens,
                        .seed = options.seed + uint64_t(index),
                        .windows = hidden.windows(),
                        .inputs = [&](int64_t w) { return hidden.get(w); },
                        .targets = [&](int64_t w) { return teacher->get(w); },
                        .after_windows = step};
      const auto add_stage = [&](const char* stage, const TrainingReport& training) {
        report.layers.push_back({index, stage, training});
        rows.push_back(report.layers.back().json());
        if (progress) progress->hide();
        if (on_layer) on_layer(report.layers.back());
      };
      if (learns_ranges) add_stage(kRanges, omniquant(block, options.omniquant, solutions));
      if (trains_weights) add_stage(kBlocks, bqpo(block, options.bqpo, solutions));
      for (size_t m = 0; m < solved.size(); ++m) {
        if (!layer.weight[m].defined()) continue;
        report.matrices.push_back(
            pack_matrix(solved[m], solutions[m], layer.weight[m], options, layout, packed.tensors));
        report.matrices.back().outlier_share = sums.outlier_share(model::Input(input_of(m)));
        rows.push_back(report.matrices.back().json());
        if (progress) progress->hide();
        if (on_matrix) on_matrix(report.matrices.back());
      }
      if (options.keep_solutions) write_solutions(solutions_path(options.work_folder, index), solutions);
      packed.report = rows.dump();
      write_layer(path, packed);
      step(hidden.windows());
      if (ahead || last) {  // the next layer's inputs are there, or there is no next
        step(hidden.windows());
        continue;
      }
    }
    const Layer& next = dense_inputs ? dense : layer;
    for (int64_t w = 0; w < hidden.windows(); ++w, step(1))
      if (!last) hidden.set(w, net.forward(next, hidden.get(w)), index);
  }
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace lacuna::compress
