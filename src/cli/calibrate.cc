// src/cli/calibrate.cc - `calibrate`: thresholds of activation sparsity from a text.
#include "calibrate/calibrate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>

#include "calibrate/cuda_subject.h"
#include "calibrate/sparse_quantiles.h"
#include "cli/command.h"
#include "cli/sparsity.h"
#include "cli/svg.h"
#include "core/error.h"
#include "core/sha256.h"
#include "io/atomic_file.h"
#include "io/documents.h"
#include "io/gguf_metadata.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, text, held_out, out, histograms;
  std::vector<std::string> modes = {"uniform", "greedy"}, criteria = {"magnitude"}, json_keys;
  std::vector<double> levels = {25, 40, 50, 65};
  calibrate::CalibrateOptions calibration;
  GpuFlags gpu;
};

std::string read_text(const std::string& path, const std::vector<std::string>& keys) {
  return io::join_documents(io::split_documents(read_input(path), keys, path));
}

/// The tokens of a text, no more than `most`.
std::vector<int32_t> tokens_of(const Tokenizer& tokenizer, const std::string& text, int64_t most) {
  std::vector<int32_t> ids = tokenizer.encode(text);
  if (int64_t(ids.size()) > most) ids.resize(size_t(most));
  return ids;
}

/// What one text has below the thresholds of one entry's level.
Json shares_json(const model::PerInput& shares, const model::InputBytes& bytes) {
  Json layers = Json::array();
  for (size_t l = 0; l < shares.size(); ++l) layers.push_back(model::skipped_share(shares[l], bytes[l]));
  return {{"act_sparsity", model::skipped_share(shares, bytes)}, {"layers", layers}, {"inputs", shares}};
}

// ---- histograms ----

constexpr int kBins = 64;

/// Upper edges that hold all but the largest thousandth.
std::vector<float> bin_edges(const calibrate::Histogram& histogram) {
  const float top = histogram.quantile(0.999);
  std::vector<float> edges;
  for (int i = 0; i < kBins; ++i) edges.push_back(top * float(i) / kBins);
  return edges;
}

Json histograms_json(const calibrate::Statistics& statistics) {
  Json rows = Json::array();
  for (size_t l = 0; l < statistics.magnitude.size(); ++l) {
    for (int64_t i = 0; i < model::kInputs; ++i) {
      const calibrate::Histogram& histogram = statistics.magnitude[l][size_t(i)];
      const std::vector<float> edges = bin_edges(histogram);
      rows.push_back({{"layer", l},
                      {"input", name_of(model::Input(i))},
                      {"values", histogram.count()},
                      {"edges", edges},
                      {"counts", histogram.counts(edges)}});
    }
  }
  return {{"histograms", "magnitudes of the layers' inputs; bin i is [edges[i], edges[i+1]), the last one open"},
          {"tokens", statistics.tokens},
          {"rows", std::move(rows)}};
}

/// A grid: a row for each layer, a column for each input.
std::string histograms_svg(const calibrate::Statistics& statistics) {
  constexpr int kWidth = 180, kHeight = 56, kLeft = 56, kTop = 34, kGap = 14;
  const int rows = int(statistics.magnitude.size());
  Svg svg;
  for (int i = 0; i < int(model::kInputs); ++i)
    svg.text(kLeft + i * (kWidth + kGap), 16, fmt::format("|x| of {}", name_of(model::Input(i))));
  for (int l = 0; l < rows; ++l) {
    const int y = kTop + l * (kHeight + kGap);
    svg.text(4, y + 0.5 * kHeight, fmt::format("layer {}", l));
    for (int i = 0; i < int(model::kInputs); ++i) {
      const calibrate::Histogram& histogram = statistics.magnitude[size_t(l)][size_t(i)];
      const std::vector<float> edges = bin_edges(histogram);
      const std::vector<int64_t> counts = histogram.counts(edges);
      const int x = kLeft + i * (kWidth + kGap);
      const double most = double(std::max<int64_t>(1, *std::max_element(counts.begin(), counts.end())));
      std::string outline = fmt::format("M{},{}", x, y + kHeight);
      for (int bin = 0; bin < kBins; ++bin)
        outline += fmt::format("V{:.1f}H{:.1f}", y + kHeight * (1 - double(counts[size_t(bin)]) / most),
                               x + double(kWidth) * (bin + 1) / kBins);
      svg.path(outline + fmt::format("V{}Z", y + kHeight), colour(0));
      svg.text(x + kWidth, y + 10, fmt::format("0 .. {:.3g}", histogram.quantile(0.999)), Svg::Anchor::end);
    }
  }
  return svg.finish(kLeft + model::kInputs * (kWidth + kGap), kTop + rows * (kHeight + kGap));
}

// ---- the command ----

/// On the CPU, or on a device with room for the longest window.
LoadedModel load(const Options& options, const calibrate::CalibrateOptions& wanted) {
  if (options.device != "cuda") return load_model(options.model, options);
  LoadedModel model = open_model(options.model, options);
  const int64_t longest = std::max({wanted.ctx, wanted.search_window, wanted.sensitivity_tokens});
  open_gpu(model, options.gpu);
  load_cuda_decoder(model, {.context = std::min(longest, model::read_config(model.checkpoint).n_ctx)}, {});
  return model;
}

std::unique_ptr<calibrate::Subject> make_subject(const LoadedModel& model) {
  if (model.cuda) return std::make_unique<calibrate::CudaSubject>(*model.cuda, *model.pool);
  return std::make_unique<calibrate::CpuSubject>(*model.decoder, model.checkpoint);
}

int run(const Options& options) {
  const std::string out = options.out.empty() ? side_file(options.model) : options.out;
  calibrate::CalibrateOptions wanted = options.calibration;
  wanted.modes.clear();
  for (const std::string& name : options.modes) {
    if (name == "both") {
      wanted.modes.insert(wanted.modes.end(), {model::Mode::uniform, model::Mode::greedy});
    } else {
      wanted.modes.push_back(model::mode_named(name));
    }
  }
  wanted.criteria.clear();
  for (const std::string& name : options.criteria) {
    if (name == "both") {
      wanted.criteria = {model::Criterion::magnitude, model::Criterion::wina};
    } else {
      wanted.criteria.push_back(model::criterion_named(name));
    }
  }
  wanted.levels.clear();
  for (const double level : options.levels) wanted.levels.push_back(level < 1 ? level : level / 100);
  if (!options.histograms.empty() && !options.histograms.ends_with(".json") && !options.histograms.ends_with(".svg"))
    throw Error("--histograms {}: the name must end in .json or .svg", options.histograms);

  for (const std::string& file : {out, options.histograms}) {  // before minutes of work
    const std::filesystem::path folder = std::filesystem::path(file).parent_path();
    if (!folder.empty() && !std::filesystem::is_directory(folder))
      throw Error("{}: cannot be written: there is no folder {}", file, folder.string());
  }
  const std::string text = read_text(options.text, options.json_keys);
  const std::string held_out = options.held_out.empty() ? "" : read_text(options.held_out, options.json_keys);
  const LoadedModel model = load(options, wanted);
  const std::unique_ptr<calibrate::Subject> subject = make_subject(model);
  wanted.ctx = std::min(wanted.ctx, subject->config().n_ctx);
  const auto start = std::chrono::steady_clock::now();
  const int64_t most =
      std::max(wanted.tokens, wanted.search_windows * wanted.search_window + wanted.sensitivity_tokens);
  const std::vector<int32_t> ids = tokens_of(model.need_tokenizer(), text, most);
  if (int64_t(ids.size()) < wanted.tokens)
    spdlog::warn("{}: {} tokens, {} were asked for; the thresholds come from fewer", options.text, ids.size(),
                 wanted.tokens);
  const calibrate::Calibration result =
      calibrate::calibrate(*subject, model.checkpoint, ids, sha256_hex(std::as_bytes(std::span(text))), wanted);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  // Stored before anything else can fail.
  const bool into_model = !options.out.empty() && model.checkpoint.source() == io::Source::gguf &&
                          !options.out.ends_with(".thresholds.gguf");
  io::Metadata metadata;
  if (into_model) {
    metadata = model.checkpoint.metadata();
  } else {
    metadata.set("general.type", std::string("thresholds"));
  }
  result.set.write(metadata);
  if (into_model)
    io::copy_gguf(model.checkpoint, metadata, out);
  else
    io::write_gguf_metadata(out, metadata);
  if (options.histograms.ends_with(".json"))
    io::write_file_atomically(options.histograms, histograms_json(result.statistics).dump() + "\n");
  else if (!options.histograms.empty())
    io::write_file_atomically(options.histograms, histograms_svg(result.statistics));

  std::vector<int32_t> other;
  if (!held_out.empty())
    other =
        tokens_of(model.need_tokenizer(), held_out, wanted.sparse_tokens > 0 ? wanted.sparse_tokens : wanted.tokens);
  const model::InputBytes bytes = subject->bytes();
  if (!options.json)
    print(fmt::format(
        "thresholds in {} from {} tokens of {}, {:.1f} s\nshare of weight bytes left "
        "out:\n{:<9}{:<11}{:>6}  {:>11}{:>22}{}\n",
        out, result.set.tokens, options.text, seconds, "mode", "criterion", "asked", "calibration",
        "layers, min .. max", !other.empty() ? fmt::format("{:>10}{:>22}", "held out", "layers, min .. max") : ""));
  for (const auto& entry : result.set.entries) {
    for (size_t i = 0; i < result.set.levels.size(); ++i) {
      const auto describe = [&](const model::PerInput& shares) {
        double least = 1, largest = 0;
        for (size_t l = 0; l < shares.size(); ++l) {
          const double share = model::skipped_share(shares[l], bytes[l]);
          least = std::min(least, share);
          largest = std::max(largest, share);
        }
        return fmt::format("{:>10.2f}%{:>11.2f}% .. {:>5.2f}%", 100 * model::skipped_share(shares, bytes), 100 * least,
                           100 * largest);
      };
      std::optional<model::PerInput> second;
      if (!other.empty()) {
        model::Thresholds thresholds;
        thresholds.criterion = entry.criterion;
        thresholds.group = result.set.group;
        if (entry.criterion == model::Criterion::wina) thresholds.norms = result.set.norms;
        thresholds.t = entry.t[i];
        second = calibrate::realised_shares(*subject, other, thresholds,
                                            {wanted.ctx, wanted.skipped, wanted.progress, "Held out"});
      }
      if (options.json) {
        Json row = {{"mode", name_of(entry.mode)},
                    {"criterion", name_of(entry.criterion)},
                    {"level", result.set.levels[i]},
                    {"group", result.set.group},
                    {"path", out},
                    {"tokens", result.set.tokens},
                    {"text_sha256", result.set.text_sha256},
                    {"device", options.device},
                    {"calibration", shares_json(entry.realised[i], bytes)}};
        if (second) row["held_out"] = shares_json(*second, bytes);
        row["seconds"] = seconds;
        print_json(row);
      } else {
        print(fmt::format("{:<9}{:<11}{:>5.0f}%  {}{}\n", name_of(entry.mode), name_of(entry.criterion),
                          100 * result.set.levels[i], describe(entry.realised[i]), second ? describe(*second) : ""));
      }
    }
  }
  return 0;
}

}  // namespace

Action add_calibrate(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "calibrate",
      "Find thresholds of activation sparsity for a model: how small an input of a layer must be to be skipped. `run`, "
      "`perplexity` and `bench` use them with --act-sparsity. What `lacuna tune` found is not used: thresholds do not "
      "depend on the machine.");
  command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder")->required();
  command
      ->add_option("--text", options->text,
                   "calibration text like what the model is used for: plain text, or JSON lines")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--held-out", options->held_out,
                   "another text, to print what the thresholds leave out of it (of as many tokens as --sparse-tokens)")
      ->type_name("FILE");
  command
      ->add_option("--json-keys", options->json_keys,
                   "keys of a JSON line whose strings make the document; default: text, else prefix,gold_completion")
      ->delimiter(',')
      ->type_name("LIST");
  command
      ->add_option("--mode", options->modes,
                   "uniform (one share everywhere), greedy (TEAL's search in each block), layered (every input by what "
                   "it does to the model's output), both (uniform,greedy)")
      ->delimiter(',')
      ->check(CLI::IsMember({"uniform", "greedy", "layered", "both"}))
      ->capture_default_str()
      ->type_name("LIST");
  command->add_option("--criterion", options->criteria, "magnitude, wina (times the column's norm), or both")
      ->delimiter(',')
      ->check(CLI::IsMember({"magnitude", "wina", "both"}))
      ->capture_default_str()
      ->type_name("LIST");
  command->add_option("--levels", options->levels, "activation sparsities to store, in percent")
      ->delimiter(',')
      ->capture_default_str()
      ->type_name("LIST");
  command
      ->add_option("-o,--output", options->out,
                   "a copy of the model with the thresholds in it, or a file NAME.thresholds.gguf of them alone; "
                   "default: MODEL.thresholds.gguf")
      ->type_name("FILE");
  command->add_option("--histograms", options->histograms, "write how large the layers' inputs are, .json or .svg")
      ->type_name("FILE");
  calibrate::CalibrateOptions& c = options->calibration;
  const auto count = [&](const char* name, int64_t& value, const char* description) {
    command->add_option(name, value, description)
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
        ->capture_default_str()
        ->type_name("N");
  };
  count("--tokens", c.tokens, "tokens of text that the quantiles come from");
  command
      ->add_option(
          "--sparse-tokens", c.sparse_tokens,
          "tokens of it that run again for each mode and level with inputs left out: what earlier layers leave "
          "out changes what later ones read; 0: thresholds are quantiles of the dense model's inputs")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str()
      ->type_name("N");
  count("--ctx", c.ctx, "tokens of a window; at most the model's context");
  command->add_option("--skip", c.skipped, "first positions of each window that are left out: they run dense in use")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("P");
  count("--search-windows", c.search_windows, "windows that the greedy search runs on");
  count("--search-window", c.search_window, "tokens of such a window");
  count("--sensitivity-tokens", c.sensitivity_tokens, "tokens on which mode layered measures each input");
  count("--group", c.group,
        "inputs that are left out together, by the root of their mean square: of a gs model its groups, of which only "
        "whole ones go unread; 1: each for itself. More are of --device cpu");
  command->add_option("--step", c.search.step, "greedy search: share of a block's weight bytes in one step")
      ->check(number_in(0.001, 1))
      ->capture_default_str()
      ->type_name("S");
  command->add_flag("--exhaustive", c.search.exhaustive,
                    "greedy search: try every matrix anew in every step, which takes several times as long");
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    if (options->device == "cuda" && options->calibration.group > 1)
      throw Error("--group finds thresholds for the CPU, where alone they are used; leave it out, or --device cuda");
    options->calibration.search.dense_prefix = options->calibration.skipped;
    return run(*options);
  };
}

}  // namespace lacuna::cli
