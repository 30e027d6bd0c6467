// src/cli/perplexity.cc - `perplexity`: how well a model predicts a text.
#include "eval/perplexity.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdio>
#include <limits>

#include "cli/command.h"
#include "cli/sparsity.h"
#include "cli/sweep.h"
#include "core/error.h"
#include "core/say.h"
#include "eval/realised.h"
#include "io/atomic_file.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, file, protocol = "hf", kv = "f16";
  std::optional<std::string> logits_out;
  int64_t ctx = 2048, chunks = 0;
  SparsityFlags sparsity;
  GpuFlags gpu;
  bool sweep = false, deterministic = false;
  std::string output, svg;
};

/// Raw logits: int32 n_vocab, int32 n_rows, then float32 rows, all little-endian. The name appears when it is complete.
class LogitsFile {
 public:
  explicit LogitsFile(const std::string& path) : path_(path), file_(path) {}
  void start(int64_t n_vocab, int64_t n_rows) {
    if (n_rows > std::numeric_limits<int32_t>::max())
      throw Error("{}: {} rows of logits are more than this file can count; score fewer windows with --chunks", path_,
                  n_rows);
    const int32_t header[2] = {int32_t(n_vocab), int32_t(n_rows)};
    file_.write(std::as_bytes(std::span(header)));
  }
  void add(std::span<const float> row) { file_.write(std::as_bytes(row)); }
  void finish() { file_.commit(); }

 private:
  std::string path_;
  io::AtomicFile file_;
};

eval::PerplexityOptions measured(const Options& options) {
  return {.ctx = options.ctx,
          .protocol = options.protocol == "hf" ? eval::Protocol::hf : eval::Protocol::llama_cpp,
          .chunks = options.chunks,
          .kv = parse_kv(options.kv),
          .progress = true,
          .on_start = {},
          .on_logits = {},
          .on_window = {}};
}

int perplexity(Options& options) {
  const bool on_cuda = options.device == "cuda";
  if (on_cuda && options.kv != "f16") throw Error("--kv is of --device cpu so far; leave it out with cuda");
  if (options.sparsity.dense_prefixes.size() > 1 && !options.sweep)
    throw Error("--dense-prefix takes one number, or several with --sweep");
  options.sparsity.dense_prefix = options.sparsity.dense_prefixes.at(0);
  if (!options.sweep && !(options.output.empty() && options.svg.empty()))
    throw Error("--output and --svg are of --sweep");
  const std::string text = read_input(options.file);
  if (options.sweep) {
    if (options.logits_out) throw Error("--logits-out is of one perplexity, not of --sweep");
    return sweep({options, options.model, options.file, text, options.protocol, options.output, options.svg,
                  options.sparsity, options.gpu, options.deterministic, measured(options)});
  }
  std::optional<LogitsFile> logits;
  if (options.logits_out) {
    check_out("--logits-out", *options.logits_out);
    logits.emplace(*options.logits_out);
  }
  LoadedModel model = on_cuda ? open_model(options.model, options)
                              : load_model(options.model, options, {.deterministic = options.deterministic});
  const Tokenizer& tokenizer = model.need_tokenizer();
  std::optional<model::Thresholds> thresholds;
  if (on_cuda) {
    thresholds = select_thresholds(model.checkpoint, options.model, options.sparsity, true);
    open_gpu(model, options.gpu);
    load_cuda_decoder(model,
                      {.context = options.ctx,
                       .deterministic = options.deterministic,
                       .gpu_layers = options.gpu.layers,
                       .shards = options.gpu.shards},
                      {.layers = true, .context = "--ctx"});
    model.cuda->count_inputs(true);
    if (thresholds) model.cuda->set_sparsity(model::SparsityOptions{*thresholds, options.sparsity.dense_prefix, true});
  } else {
    thresholds = apply_sparsity(model, options.model, options.sparsity, true);
  }

  eval::PerplexityOptions wanted = measured(options);
  if (logits) {
    wanted.on_start = [&](int64_t rows) { logits->start(model::read_config(model.checkpoint).n_vocab, rows); };
    wanted.on_logits = [&](std::span<const float> row) { logits->add(row); };
  }
  const auto start = std::chrono::steady_clock::now();
  const eval::PerplexityResult result = on_cuda ? eval::perplexity(*model.cuda, *model.pool, tokenizer, text, wanted)
                                                : eval::perplexity(*model.decoder, tokenizer, text, wanted);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (logits) logits->finish();
  std::optional<eval::Realised> realised;
  if (thresholds) {
    realised = eval::check_realised(on_cuda ? model.cuda->sparsity_counts() : model.decoder->sparsity_counts(),
                                    on_cuda ? *thresholds : model.decoder->sparsity()->thresholds,
                                    eval::tokens_behind(options.sparsity.dense_prefix, wanted, result));
    if (!realised->within) spdlog::warn("{}", realised->note);
  }

  if (options.json) {
    Json row = {{"ppl", result.ppl},
                {"stderr", result.std_error},
                {"tokens", result.tokens},
                {"windows", result.windows},
                {"ctx", options.ctx},
                {"protocol", options.protocol},
                {"bos", result.bos != eval::PerplexityResult::Bos::none},
                {"text", options.file},
                {"text_sha256", result.text_sha256},
                {"act_sparsity", result.act_sparsity},
                {"act_mode", thresholds ? name_of(thresholds->mode) : "dense"},
                {"criterion", thresholds ? name_of(thresholds->criterion) : "none"},
                {"dense_prefix", options.sparsity.dense_prefix},
                {"deterministic", options.deterministic},
                {"seconds", seconds}};
    if (realised) row.update(realised_json(*realised));
    print_json(row);
  } else {
    print(fmt::format("perplexity {:.4f} +- {:.4f}\n", result.ppl, result.std_error));
    print(fmt::format("{} tokens scored in {} windows of {}, protocol {}, BOS {}, text sha256 {}\n", result.tokens,
                      result.windows, options.ctx, options.protocol, name_of(result.bos), result.text_sha256));
    if (realised)
      print(
          fmt::format("activation sparsity {:.2f}% (asked {:.0f}%), layer {} farthest: {:.1f}% (calibrated {:.1f}%)\n",
                      100 * realised->share, 100 * realised->asked, realised->farthest,
                      100 * realised->layers[size_t(realised->farthest)],
                      100 * realised->layers_expected[size_t(realised->farthest)]));
    say("{:.1f} s, {:.1f} tokens/s, peak memory {}\n", seconds, double(result.windows * options.ctx) / seconds,
        human_bytes(peak_memory_bytes()));
  }
  return 0;
}

}  // namespace

Action add_perplexity(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "perplexity",
      "Measure how well a model predicts a text: exp of the mean negative log likelihood. What `lacuna tune` found is "
      "not used, so that the figures do not depend on the machine.");
  command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder")->required();
  command->add_option("-f,--file", options->file, "the text; - is standard input")->required()->type_name("FILE");
  command->add_option("--ctx", options->ctx, "tokens in a window")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("C");
  command
      ->add_option("--protocol", options->protocol,
                   "hf: every token but the first of a window is scored (as papers report); llama.cpp: each window "
                   "begins with BOS where the model adds one and its second half is scored (as llama-perplexity does)")
      ->check(CLI::IsMember({"hf", "llama.cpp"}))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_option("--chunks", options->chunks, "score only the first N windows; 0: all complete ones")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str()
      ->type_name("N");
  add_kv(*command, options->kv);
  add_sparsity(*command, options->sparsity, true);
  command->add_flag(
      "--deterministic", options->deterministic,
      "sums in a fixed order: the same figure with any number of threads; on cuda it matters only for tokens that run "
      "one "
      "by one (windows of fewer than eight, the last ones of a dense window, --gpu-layers), batches always are");
  command->add_flag("--sweep", options->sweep,
                    "dense and every stored level, mode and criterion in one table, for each --dense-prefix; "
                    "--act-sparsity, --act-mode and --criterion pick some");
  command->add_option("--output", options->output, "write the sweep's table as JSON")->type_name("FILE");
  command->add_option("--svg", options->svg, "draw the sweep's table")->type_name("FILE");
  command
      ->add_option(
          "--logits-out", options->logits_out,
          "write the logits of every scored position: int32 n_vocab, int32 n_rows, float32 rows, little-endian")
      ->type_name("FILE");
  add_gpu(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    if (!options->sweep) check_sparsity(*command, "--act-sparsity, or goes with --sweep");
    return perplexity(*options);
  };
}

}  // namespace lacuna::cli
