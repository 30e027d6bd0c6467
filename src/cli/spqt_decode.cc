// src/cli/spqt_decode.cc - Table 2 of `bench --spqt`: decoding with one model in several layouts.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "cli/scratch.h"
#include "cli/spqt.h"
#include "core/error.h"
#include "core/files.h"
#include "eval/bench.h"
#include "eval/cuda_decode.h"
#include "io/quantize.h"
#include "model/synth.h"
#include "model/weight_groups.h"

namespace lacuna::cli {
namespace {

constexpr int64_t kPromptTokens = 10;  // as in the paper
constexpr double kLevels[] = {0.25, 0.4, 0.5};

/// Memory that programs can have without swapping; nullopt where the system does not say.
std::optional<int64_t> available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  int64_t value = 0;
  while (file >> key >> value && std::getline(file, unit))
    if (key == "MemAvailable:") return value * 1024;
  return std::nullopt;
}

/// The model of a request in one layout after the other.
class Variants {
 public:
  explicit Variants(const SpqtRequest& request) : request_(request) {
    if (!request.model.empty()) source_.emplace(io::Checkpoint::open(request.model, request.common.threads));
  }
  std::string name() const {
    return source_ ? std::filesystem::path(request_.model).lexically_normal().filename().string() : request_.synthetic;
  }

  /// Why the model in this layout cannot run here; empty where it can.
  std::string obstacle(layout::Id id) const {
    if (already(id)) return "";
    const int64_t bytes = bytes_in(id);
    const std::optional<int64_t> memory = available_memory_bytes();
    if (memory && bytes > *memory / 100 * 95)
      return fmt::format("does not fit: {} of weights, {} of memory is free", human_bytes(bytes), human_bytes(*memory));
    const std::string folder = scratch_folder(request_.scratch);
    std::error_code unknown;
    const std::filesystem::space_info space = std::filesystem::space(folder, unknown);
    if (!unknown && bytes > int64_t(space.available / 100 * 95))
      return fmt::format("does not fit: {} of weights, {} is free in {}; choose another folder with --scratch",
                         human_bytes(bytes), human_bytes(int64_t(space.available)), folder);
    return "";
  }

  /// The path of the model in this layout, valid until the next call.
  std::string open(layout::Id id) {
    scratch_.reset();
    if (already(id)) return request_.model;
    scratch_ = std::make_unique<ScratchFile>(request_.scratch, [&](const std::string& name) {
      ThreadPool pool(request_.common.threads);
      if (source_)
        io::quantize(*source_, name, {.layout = id}, pool);
      else
        model::synthesize(
            model::find_shape(request_.synthetic), name,
            {.layout = id, .head_layout = head_of(id), .seed = request_.seed, .n_layers = request_.n_layers}, pool);
    });
    return scratch_->path();
  }

 private:
  static layout::Id head_of(layout::Id id) { return id == layout::Id::f16 ? layout::Id::f16 : layout::Id::q6_K; }

  /// Whether all matrices of the model's layers are in this layout.
  bool already(layout::Id id) const {
    if (!source_) return false;
    for (const eval::Group& group : eval::model_groups(*source_))
      for (const kernels::WeightView& part : group.parts)
        if (part.layout->id != id) return false;
    return true;
  }

  int64_t bytes_in(layout::Id id) const {
    if (source_) return io::plan_quantize(*source_, {.layout = id}).bytes;
    const model::ModelShape& shape = model::find_shape(request_.synthetic);
    double weights = 0;
    for (const eval::NamedShape& matrix : eval::layer_shapes(shape))
      weights += double(matrix.shape.N) * double(matrix.shape.K);
    weights *= double(request_.n_layers > 0 ? request_.n_layers : shape.n_layers);
    const double table = double(shape.n_vocab) * double(shape.n_embd);
    const double head = table * layout::get(head_of(id)).bits_per_weight();
    const double embedding = shape.tied ? 0 : table * layout::row_layout(layout::get(id)).bits_per_weight();
    return int64_t((weights * layout::get(id).bits_per_weight() + head + embedding) / 8);
  }

  const SpqtRequest& request_;
  std::optional<io::Checkpoint> source_;
  std::unique_ptr<ScratchFile> scratch_;
};

/// Decoding with one loaded model, as rows of the table.
class Decoding {
 public:
  Decoding(const SpqtRequest& request, const std::string& path)
      : request_(request), model_(open_model(path, request.common)) {
    if (request.common.device == "cuda") {
      open_gpu(model_, request.gpu);
      load_cuda_decoder(model_, {.context = std::max(kPromptTokens + request.gen, model::CudaDecoder::kTuneContext)},
                        {});
    }
    // With a device it checks the other one, and finds thresholds for random weights.
    model_.decoder = model::Decoder::load(model_.checkpoint, *model_.pool,
                                          {.plans = request.plans, .deterministic = request.deterministic});
    if (model_.cuda) {
      model_.cuda->tune(true);
      dense_deviation_ = eval::check_cuda_decoder(*model_.cuda, *model_.decoder);
    }
    for (const eval::Group& group : eval::model_groups(model_.checkpoint)) count(group);
    count(eval::head_group(model_.checkpoint));
  }
  const LoadedModel& model() const { return model_; }

  SpqtRow run(const std::string& group, const std::string& variant,
              const std::optional<model::Thresholds>& thresholds) {
    const auto sparsity =
        thresholds ? std::optional(model::SparsityOptions{*thresholds, request_.sparsity.dense_prefix, false})
                   : std::nullopt;
    SpqtRow out{"table2", group, variant, {}, 0, {}, ""};
    if (model_.cuda) {
      model_.cuda->set_sparsity(sparsity);
      if (sparsity) model_.cuda->tune(true);
      const double deviation =
          sparsity ? eval::check_cuda_sparsity(*model_.cuda, *model_.decoder, *sparsity) : dense_deviation_;
      out.row = eval::bench_cuda_decode(*model_.cuda, model_.checkpoint, deviation,
                                        {.tokens = request_.gen, .depth = kPromptTokens, .runs = request_.runs})
                    .front();
    } else {
      model_.decoder->set_sparsity(sparsity);
      out.row =
          eval::bench_decode(*model_.decoder, model_.checkpoint, request_.gen, kPromptTokens, request_.kv,
                             {.runs = request_.runs, .plans = request_.plans, .deterministic = request_.deterministic});
    }
    out.gflops = 2e-6 * weights_ / out.row.median_ms;
    return out;
  }

 private:
  void count(const eval::Group& group) {
    for (const kernels::WeightView& part : group.parts) weights_ += double(part.shape.N) * double(part.shape.K);
  }
  const SpqtRequest& request_;
  LoadedModel model_;
  double weights_ = 0, dense_deviation_ = 0;
};

bool has_thresholds(const SpqtRequest& request, const LoadedModel& model) {
  if (!request.sparsity.thresholds.empty()) return true;
  if (request.model.empty()) return false;
  return file_exists(side_file(request.model)) ||
         model::ThresholdSet::read(model.checkpoint.metadata(), request.model).has_value();
}

void add_sparse(const SpqtRequest& request, Decoding& decoding, const std::string& group, std::vector<SpqtRow>& rows) {
  const bool calibrated = has_thresholds(request, decoding.model());
  const model::ThresholdSet set =
      calibrated ? load_thresholds(decoding.model().checkpoint, request.model, request.sparsity)
                 : thresholds_of_random_tokens(decoding.model(), {std::begin(kLevels), std::end(kLevels)});
  for (const model::Mode mode : {model::Mode::uniform, model::Mode::greedy}) {
    if (!calibrated && mode == model::Mode::greedy) {
      rows.push_back({"table2", group, "greedy", {}, 0, {}, "needs thresholds: `lacuna calibrate`, then --thresholds"});
      continue;
    }
    for (const double level : kLevels) {
      const std::string variant = fmt::format("{} {:.0f}%", name_of(mode), 100 * level);
      std::optional<model::Thresholds> thresholds;
      try {
        thresholds = set.select(level, mode, request.sparsity.criterion_or_default(), "not stored");
        rows.push_back(decoding.run(group, variant, thresholds));
      } catch (const Error& error) {
        // The row says which are stored, or how the device differs from the CPU.
        if (thresholds && request.common.device != "cuda") throw;
        rows.push_back({"table2", group, variant, {}, 0, {}, error.what()});
      }
    }
  }
}

}  // namespace

void report_decoding(const SpqtRequest& request, SpqtReport& report) {
  Variants variants(request);
  const std::string group = variants.name();
  std::vector<SpqtRow> rows;
  const auto open = [&](const std::string& variant, layout::Id id) -> std::unique_ptr<Decoding> {
    if (const std::string obstacle = variants.obstacle(id); !obstacle.empty()) {
      rows.push_back({"table2", group, variant, {}, 0, {}, obstacle});
      return nullptr;
    }
    const std::string path = variants.open(id);
    try {
      return std::make_unique<Decoding>(request, path);
    } catch (const Error& error) {
      if (request.common.device != "cuda") throw;
      // What does not run there, or does not fit: said in the table, without the scratch file's name.
      std::string why = error.what();
      if (const size_t at = why.find(path + ": "); at != std::string::npos) why.erase(at, path.size() + 2);
      rows.push_back({"table2", group, variant, {}, 0, {}, why});
      return nullptr;
    }
  };
  for (const auto& [variant, id] : {std::pair{"f16", layout::Id::f16}, {"q4_K", layout::Id::q4_K}})
    if (const auto decoding = open(variant, id)) rows.push_back(decoding->run(group, variant, std::nullopt));
  if (const auto decoding = open("zz4_k dense", layout::Id::zz4_k)) {
    rows.push_back(decoding->run(group, "zz4_k dense", std::nullopt));
    add_sparse(request, *decoding, group, rows);
  }
  const auto base = std::find_if(rows.begin(), rows.end(), [](const SpqtRow& row) { return row.variant == "q4_K"; });
  for (SpqtRow& row : rows) {
    if (row.note.empty() && base->note.empty())
      row.speedup = {base->row.median_ms / row.row.median_ms, base->row.min_ms / row.row.max_ms,
                     base->row.max_ms / row.row.min_ms};
    report.add(row);
  }
}

}  // namespace lacuna::cli
