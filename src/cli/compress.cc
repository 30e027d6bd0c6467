// src/cli/compress.cc - `compress`: a checkpoint and a calibration text in, a smaller model that runs out.
#include "cli/compress.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <set>

#include "cli/command.h"
#include "cli/salient.h"
#include "cli/weights.h"
#include "compress/device.h"
#include "compress/e2e.h"
#include "compress/layer_influence.h"
#include "compress/walk.h"
#include "core/error.h"
#include "core/say.h"
#include "core/sha256.h"
#include "io/atomic_file.h"
#include "io/documents.h"
#include "io/gguf_model.h"
#include "io/quantize.h"
#include "solver/check.h"
#include "solver/gqsa.h"
#include "solver/project.h"
#include "solver/solve.h"

namespace lacuna::cli {
namespace {

compress::TrainingOptions not_given(compress::TrainingOptions defaults) {
  defaults.epochs = -1;
  return defaults;
}

struct Options : Common {
  std::string model, out, method = "awp+", bits = "none", pattern, layout = "auto", calib, inputs = "compressed", work,
                          drop_layers, figures;
  std::vector<std::string> json_keys;
  std::string order = "prune-first", ranges = "searched";
  double figure_share = 1;  // percent
  double sparsity = 0, token_clip = 4, first_weight = 100, damping = solver::Options().damping;
  int64_t group_size = -1;  // not given
  compress::SampleOptions samples;
  bool hidden_on_disk = false, keep_work = false, symmetric = false;
  int gpu = 0;
  compress::TrainingOptions bqpo = not_given(compress::kBqpo), omniquant = not_given(compress::kOmniquant);
  compress::E2eOptions e2e{.epochs = -1};
};

int64_t parse_count(std::string_view text, const std::string& whole) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > (int64_t{1} << 20))
    throw Error("--pattern {}: known are row, unstructured, N:M (for example 2:4) and groupG (for example group16)",
                whole);
  return value;
}

solver::Pattern parse_pattern(const Options& options) {
  using Kind = solver::Pattern::Kind;
  solver::Pattern out;
  const std::string& name = options.pattern;
  const double sparsity = options.sparsity < 1 ? options.sparsity : options.sparsity / 100;
  const size_t colon = name.find(':');
  if (colon != std::string::npos) {
    out.kind = Kind::n_m;
    out.n = parse_count(std::string_view(name).substr(0, colon), name);
    out.m = parse_count(std::string_view(name).substr(colon + 1), name);
    if (out.n >= out.m) throw Error("--pattern {}: of every M inputs fewer than M must be kept", name);
    out.sparsity = 1 - double(out.n) / double(out.m);
    if (options.sparsity > 0 && std::abs(sparsity - out.sparsity) > 1e-9)
      throw Error("--pattern {} drops {}% of the weights, --sparsity says {}%; leave one of them out", name,
                  100 * out.sparsity, 100 * sparsity);
    return out;
  }
  if (sparsity == 0) {
    if (!name.empty()) throw Error("--pattern {} needs --sparsity, the share of weights to drop in percent", name);
    return out;
  }
  out.sparsity = sparsity;
  if (name.empty()) {
    const Kind usual = solver::method(options.method).usual;
    out.kind = usual == Kind::none ? Kind::row : usual;
  } else if (name == "row") {
    out.kind = Kind::row;
  } else if (name == "unstructured") {
    out.kind = Kind::unstructured;
  } else if (name.starts_with("group")) {
    out.kind = Kind::groups;
    out.group = parse_count(std::string_view(name).substr(5), name);
  } else {
    parse_count("", name);
  }
  return out;
}

/// What there is to say of products at that rate; nothing where it is usual. The reference BLAS reaches 2 to 6 GFLOP/s,
/// any made for the processor 20 a core at least.
std::string slow_products_note(double gflops) {
  constexpr double kSlow = 10;
  if (gflops >= kSlow) return "";
  return fmt::format(
      "matrix products run at {:.1f} GFLOP/s, so compressing takes many times as long as it could: other programs need "
      "the processor, or LibTorch multiplies with a BLAS library that is not made for it; Debian's LibTorch takes "
      "OpenBLAS where libopenblas0-openmp is installed",
      gflops);
}

/// Layouts of its matrices that hold integers.
std::set<std::string> quantized_layouts(const io::Checkpoint& checkpoint) {
  std::set<std::string> out;
  for (const io::Tensor& tensor : checkpoint.tensors())
    if (io::is_matrix(tensor) && tensor.layout->bits_per_weight() < 16) out.emplace(tensor.layout->name);
  return out;
}

/// --drop-layers: a number, or a percentage of the model's layers, to the nearest number; 0 where it is not given.
int64_t layers_to_drop(const std::string& text, int64_t layers) {
  if (text.empty()) return 0;
  const bool percent = text.back() == '%';
  double value = 0;
  const char* last = text.data() + text.size() - (percent ? 1 : 0);
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error != std::errc() || end != last || !(value > 0) || (!percent && value != std::floor(value)))
    throw Error("--drop-layers {}: a number of layers, or a percentage as 25%, above 0", text);
  const double count = percent ? std::round(value / 100 * double(layers)) : value;
  if (count < 1) throw Error("--drop-layers {}: is less than half of one of {} layers", text, layers);
  if (count >= double(layers))
    throw Error("--drop-layers {}: the model has {} layers, of which one must stay", text, layers);
  return int64_t(count);
}

/// Layers that are taken out before the rest is compressed (ShortGPT).
struct Shortened {
  std::vector<double> influence;  // of each layer
  std::vector<int64_t> dropped;   // empty: none is
};

Shortened shorten(io::Checkpoint& source, std::span<const int32_t> ids, const compress::Samples& samples,
                  const compress::WalkOptions& wanted, const Options& options) {
  Shortened out;
  const int64_t count = layers_to_drop(options.drop_layers, model::read_config(source).n_layers);
  if (count == 0) return out;
  out.influence = compress::block_influence(source, ids, samples,
                                            {.device = wanted.device,
                                             .threads = wanted.threads,
                                             .hidden_file = wanted.hidden_on_disk ? wanted.work_folder + ".hidden" : "",
                                             .progress = wanted.progress});
  out.dropped = compress::least_influential(out.influence, count);
  if (source.metadata().contains(std::string(io::kThresholdPrefix) + "version"))
    spdlog::warn(
        "{}: its thresholds of activation sparsity are of its own layers and are left out; `lacuna calibrate` "
        "finds those of the result",
        options.model);
  source.drop_layers(out.dropped);
  if (options.json) {
    print_json({{"block_influence", out.influence}, {"dropped_layers", out.dropped}});
  } else {
    for (size_t layer = 0; layer < out.influence.size(); ++layer)
      print(fmt::format("layer {:>3}: influence {:.5f}{}\n", layer, out.influence[layer],
                        std::ranges::binary_search(out.dropped, int64_t(layer)) ? "  dropped" : ""));
  }
  return out;
}

/// The layers' matrices as the checkpoint holds them.
struct Stored {
  int64_t weights = 0, bytes = 0;
};
Stored layer_matrices(const io::Checkpoint& checkpoint) {
  Stored out;
  for (const io::Tensor& tensor : checkpoint.tensors())
    if (io::is_matrix(tensor) && tensor.name.starts_with("blk."))
      out.weights += tensor.shape.N * tensor.shape.K, out.bytes += int64_t(tensor.bytes.size());
  return out;
}

/// Draws which weights of a matrix are salient (GQSA, Figure 1) and says how they cluster.
void draw_salient(const std::string& name, const solver::Problem& problem, const Options& options) {
  solver::Problem single = problem;
  single.pattern = {.kind = solver::Pattern::Kind::unstructured, .sparsity = 1 - options.figure_share / 100};
  const at::Tensor top =
      solver::keep_mask(solver::gqsa_score(single), single.pattern).to(at::kCPU).to(at::kByte).contiguous();
  const SalientMap map{
      name, top.size(0), top.size(1), {top.data_ptr<uint8_t>(), size_t(top.numel())}, problem.pattern.group};
  const std::string path = fmt::format("{}/{}.svg", options.figures, name);
  io::write_file_atomically(path, draw(map));
  const Clustering clustering = clustering_of(map);
  if (options.json)
    print_json({{"figure", path},
                {"of", name},
                {"salient_share", clustering.share},
                {"group", map.group},
                {"row_groups", clustering.row_groups},
                {"column_groups", clustering.column_groups},
                {"by_chance", clustering.by_chance}});
  else
    say("{}: {:.2f}% of the groups of {} along rows hold a salient weight, {:.2f}% along columns, {:.2f}% by chance\n",
        path, 100 * clustering.row_groups, map.group, 100 * clustering.column_groups, 100 * clustering.by_chance);
}

std::vector<std::string> method_names() {
  std::vector<std::string> names;
  for (const solver::Method& method : solver::methods()) names.emplace_back(method.name);
  return names;
}

/// What is said at the end.
struct Summary {
  std::string method = {};
  int64_t bytes = 0;                          // of the file
  int64_t weights = 0, stored = 0, kept = 0;  // of the layers' matrices: weights, bytes, weights not dropped
  int64_t resumed_layers = 0;
  double solving = 0, seconds = 0;
  bool solved = true;  // and not as the source holds them
};

void print_summary(const Summary& of, const Shortened& shortened, const compress::Samples& samples,
                   const std::string& calibration_sha256, const Options& options) {
  const double weights = double(std::max<int64_t>(1, of.weights)), bits = 8.0 * double(of.stored) / weights,
               sparsity = 1 - double(of.kept) / weights;
  if (!options.json) {
    if (!shortened.dropped.empty())
      print(fmt::format("layers {} of {} dropped\n", fmt::join(shortened.dropped, ", "), shortened.influence.size()));
    const std::string matrices =
        of.solved ? fmt::format("; its compressed matrices {:.3f} bits a weight, {:.2f}% of the weights dropped", bits,
                                100 * sparsity)
                  : "";
    print(fmt::format("{}: {} ({} bytes){}\n{:.1f} s, {:.1f} of them in the solver, peak memory {}\n", options.out,
                      human_bytes(of.bytes), of.bytes, matrices, of.seconds, of.solving,
                      human_bytes(peak_memory_bytes())));
    return;
  }
  Json row = {{"path", options.out},
              {"bytes", of.bytes},
              {"method", of.method},
              {"effective_bits", bits},
              {"weight_sparsity", sparsity},
              {"calibration",
               {{"text", options.calib},
                {"sha256", calibration_sha256},
                {"windows", samples.count()},
                {"windows_asked", samples.asked},
                {"seq_len", samples.seq_len},
                {"text_tokens", samples.text_tokens}}},
              {"resumed_layers", of.resumed_layers},
              {"solver_s", of.solving},
              {"seconds", of.seconds},
              {"peak_memory_bytes", peak_memory_bytes()}};
  if (!shortened.dropped.empty()) {
    row["layers"] = shortened.influence.size();
    row["dropped_layers"] = shortened.dropped;
  }
  print_json(row);
}

std::string device_memory(int64_t bytes) {
  return bytes > 0 ? fmt::format(" and at most {} of the device's memory", human_bytes(bytes)) : "";
}

int compress(const Options& options) {
  check_out("-o", options.out);
  { const io::AtomicFile writable(options.out); }  // before hours of work, not after them
  compress::WalkOptions wanted;
  wanted.method = options.method;
  const layout::Layout* layout = layout::find(options.layout);
  const bool own_grid = layout != nullptr && layout->family == layout::Family::two_of_four;
  const bool drops_groups = solver::method(options.method).usual == solver::Pattern::Kind::groups;
  wanted.pattern = parse_pattern(options);
  if (drops_groups && wanted.pattern.kind != solver::Pattern::Kind::none &&
      wanted.pattern.kind != solver::Pattern::Kind::groups)
    throw Error("--method {} drops whole groups of inputs; leave --pattern out or give it groupG", options.method);
  if (drops_groups && options.pattern.empty() && options.group_size > 0) wanted.pattern.group = options.group_size;
  int64_t usual_group = own_grid ? layout->block_cols : solver::Grid().group_size;
  if (wanted.pattern.kind == solver::Pattern::Kind::groups) usual_group = wanted.pattern.group;
  wanted.grid = {options.bits == "none" ? 0 : std::stoi(options.bits),
                 options.group_size < 0 ? usual_group : options.group_size, options.symmetric || own_grid};
  compress::E2eOptions tuning = options.e2e;
  if (tuning.epochs < 0) tuning.epochs = drops_groups && wanted.grid.bits > 0 ? 2 : 0;
  tuning.seed = options.samples.seed;
  wanted.keep_solutions = tuning.epochs > 0;
  wanted.bqpo = options.bqpo;
  if (options.bqpo.epochs < 0) wanted.bqpo.epochs = drops_groups ? 5 : 0;
  wanted.omniquant = options.omniquant;
  if (options.omniquant.epochs < 0)
    wanted.omniquant.epochs =
        solver::method(options.method).learns_ranges ? compress::omniquant_epochs(wanted.grid.bits) : 0;
  wanted.layout = options.layout;
  wanted.inputs = options.inputs == "dense" ? compress::Inputs::dense : compress::Inputs::compressed;
  wanted.tokens = {options.first_weight, options.token_clip};
  wanted.solving.damping = options.damping;
  wanted.solving.search_ranges = options.ranges == "searched";
  wanted.solving.order = options.order == "prune-first" ? solver::Order::prune_first : solver::Order::quantize_first;
  wanted.seed = options.samples.seed;
  wanted.work_folder = options.work.empty() ? options.out + ".work" : options.work;
  wanted.hidden_on_disk = options.hidden_on_disk;
  wanted.threads = options.threads;
  const bool solves = wanted.grid.bits > 0 || wanted.pattern.kind != solver::Pattern::Kind::none;
  if (solves || options.drop_layers.empty()) compress::check(wanted);  // before anything is loaded
  if (options.device == "cuda") {
    wanted.device = compress::cuda_device(options.gpu);
  } else if (const std::string note = slow_products_note(solver::product_gflops()); !note.empty()) {
    spdlog::warn("{}", note);
  }

  io::Checkpoint source = open_weights(options.model, options);
  layers_to_drop(options.drop_layers, model::read_config(source).n_layers);
  if (std::error_code unknown; std::filesystem::equivalent(options.model, options.out, unknown))
    throw Error("{}: is the model that is read; give the new file another name", options.out);
  const std::string text =
      io::join_documents(io::split_documents(read_input(options.calib), options.json_keys, options.calib));
  if (source.vocabulary().model == Vocabulary::Model::none)
    throw Error("{}: has no tokenizer, which calibration needs; {}", options.model, kTokenizerFiles);
  const std::vector<int32_t> ids = make_tokenizer(source).encode(text);
  compress::SampleOptions sampling = options.samples;
  sampling.seq_len = std::min(sampling.seq_len, model::read_config(source).n_ctx);
  if (sampling.seq_len < options.samples.seq_len)
    spdlog::warn("--seq-len {}: the model's context is {}, so windows have that many tokens", options.samples.seq_len,
                 sampling.seq_len);
  const compress::Samples samples = compress::choose_samples(int64_t(ids.size()), sampling, options.calib);
  if (samples.count() < samples.asked)
    spdlog::warn("{}: has {} whole windows of {} tokens, {} were asked for; statistics come from fewer", options.calib,
                 samples.count(), samples.seq_len, samples.asked);
  if (const auto again = quantized_layouts(source); solves && !again.empty())
    spdlog::warn("{} was quantized already ({}): start from f16, bf16 or f32 where you can", options.model,
                 fmt::join(again, ", "));
  wanted.calibration_sha256 = sha256_hex(std::as_bytes(std::span(text)));

  if (!options.json) say("{}\n", samples.describe());
  const auto start = std::chrono::steady_clock::now();
  const Shortened shortened = shorten(source, ids, samples, wanted, options);
  if (!solves) {
    ThreadPool pool(options.threads);
    const int64_t bytes =
        io::quantize(source, options.out, {.layout = layout::Id::f32, .keep_source = true}, pool).file_bytes;
    const Stored matrices = layer_matrices(source);
    Summary summary{.method = "shortgpt", .bytes = bytes, .weights = matrices.weights, .stored = matrices.bytes};
    summary.kept = summary.weights;
    summary.solved = false;
    summary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    print_summary(summary, shortened, samples, wanted.calibration_sha256, options);
    return 0;
  }
  if (!options.json) {
    print(fmt::format("{:<28}{:>12}{:>8}{:>7}{:>12}{:>11}{:>7}{:>9}\n", "tensor", "shape", "layout", "bits",
                      "loss before", "loss", "iter", "seconds"));
  }
  if (!options.figures.empty()) {
    std::filesystem::create_directories(options.figures);
    wanted.on_problem = [&](const std::string& name, const solver::Problem& problem) {
      draw_salient(name, problem, options);
    };
  }
  const compress::WalkReport report = compress::walk(
      source, ids, samples, wanted,
      [&](const compress::MatrixReport& m) {
        if (options.json)
          print_json(m.json());
        else
          print(fmt::format("{:<28}{:>12}{:>8}{:>7.3f}{:>12.3e}{:>11.3e}{:>7}{:>9.2f}\n", m.name,
                            fmt::format("{}x{}", m.N, m.K), m.layout, m.bits, m.loss_before, m.loss, m.iterations,
                            m.seconds));
      },
      [&](const compress::LayerReport& layer) {
        if (options.json)
          print_json(layer.json());
        else
          print(fmt::format("layer {}: {} {} epochs in {:.1f} s{}, error of its result {:.3e} -> {:.3e}{}\n",
                            layer.layer, layer.stage == "bqpo" ? "trained" : "ranges learned",
                            layer.training.epochs.size(), layer.training.seconds,
                            device_memory(layer.training.device_bytes), layer.training.before, layer.training.after,
                            layer.training.kept ? "" : ", no better: left as it was"));
      });
  std::string folder = wanted.work_folder;
  if (tuning.epochs > 0) {
    const compress::E2eReport tuned = compress::e2e(source, ids, samples, wanted, tuning);
    folder = compress::tuned_folder(folder);
    if (options.json)
      print_json(tuned.json());
    else
      print(fmt::format("scales and zero points trained {} steps in {:.1f} s{}, {:.4f} -> {:.4f} nats a token{}\n",
                        tuned.steps, tuned.seconds, device_memory(tuned.device_bytes), tuned.before, tuned.after,
                        tuned.kept ? "" : ", no better: left as they were"));
  }
  const int64_t bytes = compress::write_model(source, folder, model::read_config(source).n_layers, options.out);
  if (!options.keep_work) compress::remove_work(wanted.work_folder);

  Summary summary{.method = options.method, .bytes = bytes, .resumed_layers = report.resumed_layers};
  for (const compress::MatrixReport& m : report.matrices) {
    summary.weights += m.N * m.K;
    summary.stored += m.bytes;
    summary.kept += int64_t(std::llround((1 - m.sparsity) * double(m.N) * double(m.K)));
    summary.solving += m.seconds;
  }
  summary.seconds = report.seconds;
  print_summary(summary, shortened, samples, wanted.calibration_sha256, options);
  return 0;
}

}  // namespace

Action add_compress(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      program.add_subcommand("compress",
                             "Make a model smaller by dropping weights, by storing them in few bits, "
                             "or both, so that its layers' outputs on a "
                             "calibration text change least. Every matrix of the layers is compressed; "
                             "embeddings and output head stay as they are, norms and biases too but where "
                             "awq folds its scales into them. A run that was stopped goes on where it was.");
  command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder, best in f32, f16 or bf16")
      ->required();
  command->add_option("-o,--out", options->out, "the file to write; it appears when it is complete")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--calib", options->calib,
                   "calibration text like what the model is used for: plain text, or JSON lines")
      ->required()
      ->type_name("FILE");
  command->add_option("--method", options->method, fmt::format("one of {}", fmt::join(method_names(), ", ")))
      ->check(CLI::IsMember(method_names()))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_option("--bits", options->bits, "bits of a weight: 2, 3, 4, 8, or none")
      ->check(CLI::IsMember({"2", "3", "4", "8", "none"}))
      ->capture_default_str()
      ->type_name("B");
  command
      ->add_option(
          "--group-size", options->group_size,
          "inputs that share a scale and a zero point; 0: a whole row; default: 128, 64 with --layout nm24_q4, "
          "the pattern's with a gs layout")
      ->check(integer_in(0, int64_t{1} << 30))
      ->type_name("G");
  command->add_flag("--symmetric", options->symmetric,
                    "the zero point of every group is half of the codes, as nm24_q4 needs it");
  command->add_option("--sparsity", options->sparsity, "share of the weights to drop: percent, or a fraction below 1")
      ->check(number_in(0, 99.99))
      ->type_name("S");
  command
      ->add_option("--drop-layers", options->drop_layers,
                   "take whole layers out first, those that change the direction of the text's hidden states least "
                   "(ShortGPT): a number of them, or a percentage as 25%; may stand alone, without --bits and "
                   "--sparsity")
      ->type_name("N");
  command
      ->add_option(
          "--pattern", options->pattern,
          "which weights may be dropped: row (the same number in every row), unstructured (in the whole matrix), N:M "
          "(all but N of every M inputs), groupG (whole groups of G inputs); default: as the method's paper, "
          "unstructured for magnitude and sparsegpt, row for the others")
      ->type_name("NAME");
  command
      ->add_option("--layout", options->layout,
                   "how to store the result; auto: gq for bits alone, bm where weights are dropped; nm24_q4: --bits 4 "
                   "--pattern 2:4; gsB: --bits B --pattern groupG")
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--json-keys", options->json_keys,
                   "keys of a JSON line whose strings make the document; default: text, else prefix,gold_completion")
      ->delimiter(',')
      ->type_name("LIST");
  command->add_option("--samples", options->samples.samples, "windows of text")
      ->check(integer_in(1, int64_t{1} << 30))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--seq-len", options->samples.seq_len, "tokens of a window")
      ->check(integer_in(1, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("T");
  command
      ->add_option("--inputs", options->inputs,
                   "what a layer's statistics see of the layers before it: compressed (as they will run) or dense")
      ->check(CLI::IsMember({"compressed", "dense"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--token-clip", options->token_clip,
                   "scale a token of the text down whose squared norm at a layer's input is more than C times its "
                   "window's median; 0: take all as they are, as the methods' papers do")
      ->check(number_in(0, 1e9))
      ->capture_default_str()
      ->type_name("C");
  command
      ->add_option("--first-weight", options->first_weight,
                   "how much the first token of a window counts in the statistics: attention of trained models rests "
                   "on it, and a layer that is wrong there is wrong for the whole text; 1: like any other, as the "
                   "methods' papers do")
      ->check(number_in(0, 1e9, true))
      ->capture_default_str()
      ->type_name("W");
  command
      ->add_option("--damping", options->damping,
                   "gptq, sparsegpt, gqsa, awp+ with --bits: what is added to the second moment's diagonal, as a share "
                   "of its mean")
      ->check(number_in(0, 10))
      ->capture_default_str()
      ->type_name("D");
  command
      ->add_option("--order", options->order,
                   "awp with --bits and --sparsity: which projection comes first, prune-first or quantize-first")
      ->check(CLI::IsMember({"prune-first", "quantize-first"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--ranges", options->ranges,
                   "awp+ and awq's methods with --bits: what a group's grid covers, searched (less than its weights "
                   "span where that loses less; awp+ also refits its scales) or whole (scales stay); try whole where "
                   "fewer bits cost more than the losses say")
      ->check(CLI::IsMember({"searched", "whole"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option(
          "--omniquant-epochs", options->omniquant.epochs,
          "omniquant: learn what each group's grid covers against the dense layer's result, so many times over "
          "the text's windows; default: 40 with --bits 2, else 20")
      ->check(integer_in(0, 10000))
      ->type_name("N");
  command->add_option("--omniquant-lr", options->omniquant.lr, "its learning rate; with few --samples, more is better")
      ->check(number_in(0, 1, true))
      ->capture_default_str()
      ->type_name("L");
  command->add_option("--omniquant-batch", options->omniquant.batch, "windows of one of its steps")
      ->check(integer_in(1, 4096))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--bqpo-epochs", options->bqpo.epochs,
                   "train the weights that each layer keeps against the dense layer's result (GQSA's block "
                   "quantization-pruning optimisation), so many times over the text's windows; default: 5 for gqsa, 0 "
                   "for the others")
      ->check(integer_in(0, 10000))
      ->type_name("N");
  command
      ->add_option(
          "--e2e-epochs", options->e2e.epochs,
          "then train all scales and zero points on the whole net's next-token loss, codes frozen (GQSA's "
          "end-to-end optimisation), so many times over the text's windows; default: 2 for gqsa with --bits, 0 "
          "else")
      ->check(integer_in(0, 10000))
      ->type_name("N");
  command->add_option("--e2e-lr", options->e2e.lr, "its learning rate")
      ->check(number_in(0, 1, true))
      ->capture_default_str()
      ->type_name("L");
  command->add_option("--e2e-batch", options->e2e.batch, "windows of one of its steps")
      ->check(integer_in(1, 4096))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--bqpo-lr", options->bqpo.lr, "its learning rate; with few --samples, more is better")
      ->check(number_in(0, 1, true))
      ->capture_default_str()
      ->type_name("L");
  command->add_option("--bqpo-batch", options->bqpo.batch, "windows of one of its steps")
      ->check(integer_in(1, 4096))
      ->capture_default_str()
      ->type_name("N");
  add_seed(*command, options->samples.seed, "which windows of the text are taken, where it has more than --samples");
  command->add_option("--work", options->work, "folder for finished layers; default: FILE.work, removed at the end")
      ->type_name("FOLDER");
  command->add_flag("--keep-work", options->keep_work, "leave that folder where it is");
  command->add_flag("--hidden-on-disk", options->hidden_on_disk,
                    "keep the text's hidden states in the work folder, not in memory");
  command
      ->add_option("--figures", options->figures,
                   "draw into this folder, an SVG for each matrix, which of its weights are salient (GQSA, Figure 1); "
                   "layers that a run before this one finished are not drawn again")
      ->type_name("FOLDER");
  command->add_option("--figure-share", options->figure_share, "share of a matrix's weights that is drawn, in percent")
      ->check(number_in(0, 99, true))
      ->capture_default_str()
      ->type_name("P");
  command->add_option("--gpu", options->gpu, "number of the CUDA device that solves")
      ->check(CLI::Range(0, 127))
      ->capture_default_str()
      ->type_name("N")
      ->group("CUDA");
  add_common(*command, *options);
  return [options, command] {
    const solver::Method& method = solver::method(options->method);
    const bool rounds = options->bits != "none", drops = options->sparsity > 0 || !options->pattern.empty();
    if (!rounds && !drops && !options->drop_layers.empty())
      refuse_given(*command,
                   {"--method", "--layout", "--inputs", "--token-clip", "--first-weight", "--bqpo-epochs",
                    "--e2e-epochs", "--omniquant-epochs", "--work", "--keep-work", "--figures"},
                   "--bits or --sparsity");
    if (options->figures.empty()) refuse_given(*command, {"--figure-share"}, "--figures");
    if (options->device != "cuda") refuse_given(*command, {"--gpu"}, "--device cuda");
    const bool heeds = method.damped && (rounds || method.does == solver::Method::Does::prune_or_both);
    if (!heeds) refuse_given(*command, {"--damping"}, "--method gptq, sparsegpt or gqsa, or awp+ with --bits");
    if (!method.ordered || !rounds || !drops)
      refuse_given(*command, {"--order"}, "--method awp with --bits and --sparsity");
    if (!method.ranged || !rounds)
      refuse_given(*command, {"--ranges"}, "--method awp+, awq, awq+wanda or wanda+awq with --bits");
    const bool trains =
        options->bqpo.epochs > 0 || (options->bqpo.epochs < 0 && method.usual == solver::Pattern::Kind::groups);
    if (!method.learns_ranges) refuse_given(*command, {"--omniquant-epochs"}, "--method omniquant");
    if (!method.learns_ranges || options->omniquant.epochs == 0)
      refuse_given(*command, {"--omniquant-lr", "--omniquant-batch"}, "--method omniquant, with epochs");
    if (!trains) refuse_given(*command, {"--bqpo-lr", "--bqpo-batch"}, "--bqpo-epochs or --method gqsa");
    const bool tunes =
        options->e2e.epochs > 0 || (options->e2e.epochs < 0 && method.usual == solver::Pattern::Kind::groups && rounds);
    if (!tunes) refuse_given(*command, {"--e2e-lr", "--e2e-batch"}, "--e2e-epochs, or --method gqsa with --bits");
    if (!rounds && options->e2e.epochs > 0) throw Error("--e2e-epochs needs --bits: it trains scales and zero points");
    if (!rounds) refuse_given(*command, {"--symmetric", "--group-size"}, "--bits");
    return compress(*options);
  };
}

}  // namespace lacuna::cli
