#include "cli/sweep.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/progress.h"
#include "io/atomic_file.h"
#include "lacuna_commit.h"

namespace lacuna::cli {
namespace {

/// One line of the table: which thresholds, and what came of them.
struct Row {
  std::string mode = "dense", criterion = "none";
  double level = 0;
  int64_t dense_prefix = 0;
  std::optional<model::Thresholds> thresholds = std::nullopt;  // nullopt: dense; gone once measured
  eval::PerplexityResult result = {};
  eval::Realised realised = {};
  double seconds = 0;
};

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).lexically_normal().filename().string();
}

std::vector<Row> rows_of(const SweepOptions& options, const model::ThresholdSet& set) {
  const SparsityFlags& flags = options.sparsity;
  std::vector<Row> rows(1);
  for (const int64_t prefix : flags.dense_prefixes) {
    for (const auto& entry : set.entries) {
      if (!flags.mode.empty() && flags.mode != name_of(entry.mode)) continue;
      if (!flags.criterion.empty() && flags.criterion != name_of(entry.criterion)) continue;
      for (const double level : set.levels)
        if (!flags.sparse() || model::same_level(level, flags.act_sparsity))
          rows.push_back({std::string(name_of(entry.mode)), std::string(name_of(entry.criterion)), level, prefix,
                          set.select(level, entry.mode, entry.criterion, options.model)});
    }
  }
  return rows;
}

Json row_json(const Row& row, const SweepOptions& options, double dense) {
  Json out = {{"model", file_name(options.model)},
              {"act_mode", row.mode},
              {"criterion", row.criterion},
              {"level", row.level},
              {"ppl", row.result.ppl},
              {"stderr", row.result.std_error},
              {"over_dense", row.result.ppl / dense - 1},
              {"act_sparsity", row.result.act_sparsity},
              {"dense_prefix", row.dense_prefix},
              {"tokens", row.result.tokens},
              {"windows", row.result.windows},
              {"ctx", options.perplexity.ctx},
              {"protocol", options.protocol},
              {"bos", row.result.bos != eval::PerplexityResult::Bos::none},
              {"text_sha256", row.result.text_sha256},
              {"deterministic", options.deterministic},
              {"seconds", row.seconds}};
  if (row.level > 0) out.update(realised_json(row.realised));
  return out;
}

std::string row_text(const Row& row, double dense) {
  std::string out = fmt::format("{:<8} {:<10} {:>5.0f}% {:>6} {:>10.3f} {:>8.3f} {:>+9.1f}%", row.mode, row.criterion,
                                100 * row.level, row.level > 0 ? std::to_string(row.dense_prefix) : "-", row.result.ppl,
                                row.result.std_error, 100 * (row.result.ppl / dense - 1));
  if (row.level > 0) {
    const auto far = size_t(row.realised.farthest);
    out += fmt::format(" {:>9.2f}%   {:>2}: {:.1f}% ({:.1f}%){}", 100 * row.realised.share, far,
                       100 * row.realised.layers[far], 100 * row.realised.layers_expected[far],
                       row.realised.within ? "" : " !");
  }
  return out + "\n";
}

/// Perplexity over sparsity, one line a mode, criterion and prefix; dashes: dense.
std::string sweep_svg(const std::vector<Row>& rows) {
  constexpr int kWidth = 520, kHeight = 340, kLeft = 60, kTop = 20;
  constexpr const char* kColours[] = {"#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"};
  const double low = rows[0].result.ppl * 0.95;
  double high = low;
  for (const Row& row : rows) high = std::max(high, row.result.ppl * 1.02);
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
    const Row& first = rows[begin];
    const auto same = [&](const Row& row) {
      return row.mode == first.mode && row.criterion == first.criterion && row.dense_prefix == first.dense_prefix;
    };
    size_t end = begin;
    std::string path = fmt::format("M{:.1f},{:.1f}", x(0), y(rows[0].result.ppl));
    for (; end < rows.size() && same(rows[end]); ++end) {
      path += fmt::format("L{:.1f},{:.1f}", x(rows[end].level), y(rows[end].result.ppl));
      if (line == 0)
        out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}%</text>\n", x(rows[end].level),
                           kHeight - 24, 100 * rows[end].level);
    }
    const char* colour = kColours[line % std::size(kColours)];
    const char* dashes = line < std::size(kColours) ? "" : " stroke-dasharray=\"6 3\"";
    out += fmt::format(
        "<path fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{} d=\"{}\"/>\n<text x=\"{}\" y=\"{}\" "
        "fill=\"{}\">{} {}, first {} dense</text>\n",
        colour, dashes, path, kLeft + 10, kTop + 14 * int(line + 1), colour, first.mode, first.criterion,
        first.dense_prefix);
    begin = end;
  }
  return out + "</svg>\n";
}

/// The command line that gives these rows, without folders.
std::string command_of(const SweepOptions& options) {
  const SparsityFlags& flags = options.sparsity;
  std::string out =
      fmt::format("lacuna perplexity {} -f {} --sweep --ctx {} --chunks {} --protocol {} --dense-prefix {}",
                  file_name(options.model), file_name(options.file), options.perplexity.ctx, options.perplexity.chunks,
                  options.protocol, fmt::join(flags.dense_prefixes, ","));
  if (flags.sparse()) out += fmt::format(" --act-sparsity {:g}", flags.act_sparsity);
  if (!flags.mode.empty()) out += " --act-mode " + flags.mode;
  if (!flags.criterion.empty()) out += " --criterion " + flags.criterion;
  if (options.deterministic) out += " --deterministic";
  if (options.common.device != "cpu") out += " --device " + options.common.device;
  return out;
}

void write_json(const SweepOptions& options, const model::ThresholdSet& set, const std::string& device,
                const std::vector<Row>& rows) {
  Json all = Json::array();
  for (const Row& row : rows) all.push_back(row_json(row, options, rows[0].result.ppl));
  io::write_file_atomically(options.output, Json{{"command", command_of(options)},
                                                 {"commit", LACUNA_COMMIT},
                                                 {"date", fmt::format("{:%F}", std::chrono::system_clock::now())},
                                                 {"device", device},
                                                 {"threshold_tokens", set.tokens},
                                                 {"threshold_text_sha256", set.text_sha256},
                                                 {"rows", std::move(all)}}
                                                    .dump(1) +
                                                "\n");
}

}  // namespace

Json realised_json(const eval::Realised& realised) {
  return {{"act_sparsity_asked", realised.asked},   {"act_sparsity_calibrated", realised.expected},
          {"act_sparsity_layers", realised.layers}, {"act_sparsity_layers_calibrated", realised.layers_expected},
          {"act_sparsity_within", realised.within}, {"act_sparsity_note", realised.note}};
}

int sweep(const SweepOptions& options) {
  const bool on_cuda = options.common.device == "cuda";
  LoadedModel model = on_cuda ? open_model(options.model, options.common)
                              : load_model(options.model, options.common, {.deterministic = options.deterministic});
  if (on_cuda) {
    open_gpu(model, options.gpu);
    load_cuda_decoder(model,
                      {.context = options.perplexity.ctx,
                       .deterministic = options.deterministic,
                       .gpu_layers = options.gpu.layers,
                       .shards = options.gpu.shards},
                      {.layers = true, .context = "--ctx"});
    model.cuda->count_inputs(true);
  }
  const model::ThresholdSet set = load_thresholds(model.checkpoint, options.model, options.sparsity);
  std::vector<Row> rows = rows_of(options, set);
  std::optional<Progress> progress;
  eval::PerplexityOptions wanted = options.perplexity;
  wanted.progress = false;  // one for all rows instead
  wanted.on_start = [&](int64_t scored) {
    if (!progress) progress.emplace("Sweep", scored * int64_t(rows.size()), "tokens");
  };
  wanted.on_window = [&](int64_t scored) { progress->add(scored); };

  if (!options.common.json)
    print(fmt::format("context {}, protocol {}, {} rows\n{:<8} {:<10} {:>6} {:>6} {:>10} {:>8} {:>10} {:>10}   {}\n",
                      wanted.ctx, options.protocol, rows.size(), "mode", "criterion", "asked", "prefix", "perplexity",
                      "+-", "over dense", "realised", "farthest layer (calibrated)"));
  bool beyond = false;
  for (Row& row : rows) {
    std::optional<model::SparsityOptions> sparsity;
    if (row.thresholds) sparsity = model::SparsityOptions{*row.thresholds, row.dense_prefix, true};
    if (on_cuda)
      model.cuda->set_sparsity(std::move(sparsity));
    else
      model.decoder->set_sparsity(std::move(sparsity));
    const auto start = std::chrono::steady_clock::now();
    const Tokenizer& tokenizer = model.need_tokenizer();
    row.result = on_cuda ? eval::perplexity(*model.cuda, *model.pool, tokenizer, options.text, wanted)
                         : eval::perplexity(*model.decoder, tokenizer, options.text, wanted);
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (row.thresholds)
      row.realised = eval::check_realised(on_cuda ? model.cuda->sparsity_counts() : model.decoder->sparsity_counts(),
                                          on_cuda ? *row.thresholds : model.decoder->sparsity()->thresholds,
                                          eval::tokens_behind(row.dense_prefix, wanted, row.result));
    row.thresholds.reset();
    beyond |= !row.realised.within;
    progress->hide();
    const double dense = rows[0].result.ppl;
    if (options.common.json)
      print_json(row_json(row, options, dense));
    else
      print(row_text(row, dense));
  }
  progress.reset();
  const eval::PerplexityResult& dense = rows[0].result;
  if (!options.common.json) {
    print(fmt::format("{} tokens scored in {} windows, text sha256 {}, thresholds from {} tokens (text sha256 {})\n",
                      dense.tokens, dense.windows, dense.text_sha256, set.tokens, set.text_sha256));
    if (beyond)
      print(
          fmt::format("!: more than {:.0f} points from the level asked for, or a layer more than {:.0f} points from "
                      "what the calibration text gave it\n",
                      100 * eval::kWholeBound, 100 * eval::kLayerBound));
  }
  if (!options.output.empty())
    write_json(options, set, on_cuda ? model.gpu->info().name : fmt::format("cpu ({})", kernels::isa_name()), rows);
  if (!options.svg.empty()) io::write_file_atomically(options.svg, sweep_svg(rows));
  return 0;
}

}  // namespace lacuna::cli
