// src/cli/perplexity.cc - `perplexity`: how well a model predicts a text.
#include "eval/perplexity.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>

#include "cli/command.h"
#include "cli/sparsity.h"
#include "core/error.h"
#include "io/atomic_file.h"
#include "lacuna_commit.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, file, protocol = "hf", kv = "f16";
  std::optional<std::string> logits_out;
  int64_t ctx = 2048, chunks = 0;
  SparsityFlags sparsity;
  bool sweep = false;
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
          .on_logits = {}};
}

// ---- the sweep over the stored thresholds: SpQt's Table 3 ----

struct SweepRow {
  std::string mode = "dense", criterion = "none";
  double level = 0;
  eval::PerplexityResult result;
  double worst_layer = 0;  // realised share of the layer that is farthest from what calibration gave it
  double expected = 0;     // of that layer
  double seconds = 0;
};

Json row_json(const SweepRow& row, const Options& options, double dense) {
  return {{"model", std::filesystem::path(options.model).lexically_normal().filename().string()},
          {"act_mode", row.mode},
          {"criterion", row.criterion},
          {"level", row.level},
          {"ppl", row.result.ppl},
          {"stderr", row.result.std_error},
          {"over_dense", row.result.ppl / dense - 1},
          {"act_sparsity", row.result.act_sparsity},
          {"farthest_layer", row.worst_layer},
          {"farthest_layer_expected", row.expected},
          {"dense_prefix", options.sparsity.dense_prefix},
          {"tokens", row.result.tokens},
          {"windows", row.result.windows},
          {"ctx", options.ctx},
          {"protocol", options.protocol},
          {"bos", row.result.bos},
          {"text_sha256", row.result.text_sha256},
          {"seconds", row.seconds}};
}

/// Perplexity over sparsity, one line a mode and criterion; dashes: dense.
std::string sweep_svg(const std::vector<SweepRow>& rows) {
  constexpr int kWidth = 520, kHeight = 340, kLeft = 60, kTop = 20;
  constexpr const char* kColours[] = {"#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"};
  const double low = rows[0].result.ppl * 0.95;
  double high = low;
  for (const SweepRow& row : rows) high = std::max(high, row.result.ppl * 1.02);
  const auto x = [&](double level) { return kLeft + level / 0.8 * (kWidth - kLeft - 10); };
  const auto y = [&](double ppl) {  // logarithmic
    return kTop + (kHeight - kTop - 40) * (1 - std::log(ppl / low) / std::log(high / low));
  };
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<path stroke=\"#888\" stroke-dasharray=\"4\" d=\"M{:.1f},{:.1f}H{}\"/>\n"
      "<text x=\"4\" y=\"{:.1f}\">{:.2f}</text><text x=\"4\" y=\"{}\">{:.2f}</text>\n"
      "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">activation sparsity; perplexity on a logarithmic scale</text>\n",
      kWidth, kHeight, x(0), y(rows[0].result.ppl), kWidth - 10, y(rows[0].result.ppl), rows[0].result.ppl, kTop + 8,
      high, kWidth / 2, kHeight - 6);
  size_t line = 0;
  for (size_t begin = 1; begin < rows.size(); ++line) {
    size_t end = begin;
    std::string path = fmt::format("M{:.1f},{:.1f}", x(0), y(rows[0].result.ppl));
    for (; end < rows.size() && rows[end].mode == rows[begin].mode && rows[end].criterion == rows[begin].criterion;
         ++end) {
      path += fmt::format("L{:.1f},{:.1f}", x(rows[end].level), y(rows[end].result.ppl));
      out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}%</text>\n", x(rows[end].level),
                         kHeight - 24, 100 * rows[end].level);
    }
    const char* colour = kColours[line % std::size(kColours)];
    out += fmt::format(
        "<path fill=\"none\" stroke=\"{}\" stroke-width=\"2\" d=\"{}\"/>\n<text x=\"{}\" y=\"{}\" fill=\"{}\">{} "
        "{}</text>\n",
        colour, path, kLeft + 10, kTop + 14 * int(line + 1), colour, rows[begin].mode, rows[begin].criterion);
    begin = end;
  }
  return out + "</svg>\n";
}

int sweep(const Options& options, const std::string& text, const eval::PerplexityOptions& wanted) {
  const LoadedModel model = load_model(options.model, options);
  const Tokenizer& tokenizer = model.need_tokenizer();
  const model::ThresholdSet set = load_thresholds(model, options.model, options.sparsity);
  std::vector<SweepRow> rows;
  const auto measure = [&](SweepRow row, const std::optional<model::Thresholds>& thresholds) {
    model.decoder->set_sparsity(std::nullopt);
    if (thresholds)
      model.decoder->set_sparsity(model::SparsityOptions{*thresholds, options.sparsity.dense_prefix, true});
    const auto start = std::chrono::steady_clock::now();
    row.result = eval::perplexity(*model.decoder, tokenizer, text, wanted);
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const model::SparsityCounts& counts = model.decoder->sparsity_counts();
    for (size_t l = 0; thresholds && l < counts.layers.size(); ++l) {
      const double expected = model::skipped_share(thresholds->realised[l], counts.bytes[l]);
      const double share = counts.layer_share(int64_t(l));
      if (std::abs(share - expected) >= std::abs(row.worst_layer - row.expected))
        row.worst_layer = share, row.expected = expected;
    }
    rows.push_back(row);
    const double dense = rows[0].result.ppl;
    if (options.json) {
      print_json(row_json(rows.back(), options, dense));
    } else {
      print(fmt::format("{:<8} {:<10} {:>5.0f}% {:>10.3f} {:>8.3f} {:>+9.1f}% {:>9.2f}%   {:.1f}% ({:.1f}%)\n",
                        row.mode, row.criterion, 100 * row.level, row.result.ppl, row.result.std_error,
                        100 * (row.result.ppl / dense - 1), 100 * row.result.act_sparsity, 100 * row.worst_layer,
                        100 * row.expected));
    }
  };
  if (!options.json)
    print(fmt::format(
        "context {}, protocol {}, first {} positions dense\n{:<8} {:<10} {:>6} {:>10} {:>8} {:>10} {:>10}   {}\n",
        options.ctx, options.protocol, options.sparsity.dense_prefix, "mode", "criterion", "asked", "perplexity", "+-",
        "over dense", "realised", "farthest layer (calibrated)"));
  measure({}, std::nullopt);
  for (const auto& entry : set.entries) {
    if (!options.sparsity.mode.empty() && options.sparsity.mode != name_of(entry.mode)) continue;
    if (!options.sparsity.criterion.empty() && options.sparsity.criterion != name_of(entry.criterion)) continue;
    for (const double level : set.levels) {
      if (options.sparsity.sparse() && !model::same_level(level, options.sparsity.act_sparsity)) continue;
      measure({std::string(name_of(entry.mode)), std::string(name_of(entry.criterion)), level, {}, 0, 0, 0},
              set.select(level, entry.mode, entry.criterion, options.model));
    }
  }
  if (!options.json)
    print(fmt::format("{} tokens scored in {} windows, text sha256 {}, thresholds from {} tokens (text sha256 {})\n",
                      rows[0].result.tokens, rows[0].result.windows, rows[0].result.text_sha256, set.tokens,
                      set.text_sha256));
  if (!options.output.empty()) {
    Json all = Json::array();
    for (const SweepRow& row : rows) all.push_back(row_json(row, options, rows[0].result.ppl));
    const auto name = [](const std::string& path) {
      return std::filesystem::path(path).lexically_normal().filename().string();
    };
    std::string command = fmt::format(
        "lacuna perplexity {} -f {} --sweep --ctx {} --chunks {} --protocol {} --dense-prefix {}", name(options.model),
        name(options.file), options.ctx, options.chunks, options.protocol, options.sparsity.dense_prefix);
    if (options.sparsity.sparse()) command += fmt::format(" --act-sparsity {:g}", options.sparsity.act_sparsity);
    if (!options.sparsity.mode.empty()) command += " --act-mode " + options.sparsity.mode;
    if (!options.sparsity.criterion.empty()) command += " --criterion " + options.sparsity.criterion;
    write_output(options.output, Json{{"command", command},
                                      {"commit", LACUNA_COMMIT},
                                      {"date", fmt::format("{:%F}", std::chrono::system_clock::now())},
                                      {"device", fmt::format("cpu ({})", kernels::isa_name())},
                                      {"threshold_tokens", set.tokens},
                                      {"threshold_text_sha256", set.text_sha256},
                                      {"rows", std::move(all)}}
                                         .dump(1) +
                                     "\n");
  }
  if (!options.svg.empty()) write_output(options.svg, sweep_svg(rows));
  return 0;
}

int perplexity(const Options& options) {
  check_common(options);
  if (!options.sweep && !(options.output.empty() && options.svg.empty()))
    throw Error("--output and --svg are of --sweep");
  const std::string text = read_input(options.file);
  if (options.sweep) {
    if (options.logits_out) throw Error("--logits-out is of one perplexity, not of --sweep");
    return sweep(options, text, measured(options));
  }
  std::optional<LogitsFile> logits;
  if (options.logits_out) {
    check_out("--logits-out", *options.logits_out);
    logits.emplace(*options.logits_out);
  }
  const LoadedModel model = load_model(options.model, options);
  const Tokenizer& tokenizer = model.need_tokenizer();

  eval::PerplexityOptions wanted = measured(options);
  if (logits) {
    wanted.on_start = [&](int64_t rows) { logits->start(model.decoder->config().n_vocab, rows); };
    wanted.on_logits = [&](std::span<const float> row) { logits->add(row); };
  }
  const auto thresholds = apply_sparsity(model, options.model, options.sparsity, true);
  const auto start = std::chrono::steady_clock::now();
  const eval::PerplexityResult result = eval::perplexity(*model.decoder, tokenizer, text, wanted);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (logits) logits->finish();

  if (options.json) {
    print_json({{"ppl", result.ppl},
                {"stderr", result.std_error},
                {"tokens", result.tokens},
                {"windows", result.windows},
                {"ctx", options.ctx},
                {"protocol", options.protocol},
                {"bos", result.bos},
                {"text_sha256", result.text_sha256},
                {"act_sparsity", result.act_sparsity},
                {"act_mode", thresholds ? name_of(thresholds->mode) : "dense"},
                {"criterion", thresholds ? name_of(thresholds->criterion) : "none"},
                {"dense_prefix", options.sparsity.dense_prefix},
                {"seconds", seconds}});
  } else {
    print(fmt::format("perplexity {:.4f} +- {:.4f}\n", result.ppl, result.std_error));
    print(fmt::format("{} tokens scored in {} windows of {}, protocol {}, BOS {}, text sha256 {}\n", result.tokens,
                      result.windows, options.ctx, options.protocol, result.bos ? "yes" : "no", result.text_sha256));
    fmt::print(stderr, "{:.1f} s, {:.1f} tokens/s, peak memory {}\n", seconds,
               double(result.windows * options.ctx) / seconds, human_bytes(peak_memory_bytes()));
  }
  return 0;
}

}  // namespace

Action add_perplexity(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "perplexity", "Measure how well a model predicts a text: exp of the mean negative log likelihood.");
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
  add_sparsity(*command, options->sparsity);
  command->add_flag("--sweep", options->sweep,
                    "dense and every stored level, mode and criterion in one table; --act-sparsity, --act-mode and "
                    "--criterion pick some");
  command->add_option("--output", options->output, "write the sweep's table as JSON")->type_name("FILE");
  command->add_option("--svg", options->svg, "draw the sweep's table")->type_name("FILE");
  command
      ->add_option(
          "--logits-out", options->logits_out,
          "write the logits of every scored position: int32 n_vocab, int32 n_rows, float32 rows, little-endian")
      ->type_name("FILE");
  add_common(*command, *options);
  return [options] { return perplexity(*options); };
}

}  // namespace lacuna::cli
