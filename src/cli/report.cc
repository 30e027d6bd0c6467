// src/cli/report.cc - `report`: what several runs gave, side by side.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>

#include "cli/command.h"
#include "cli/svg.h"
#include "core/error.h"
#include "io/atomic_file.h"
#include "io/json.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::vector<std::string> files;
  std::string svg, tensor;
};

/// What training of one layer, or of the whole net, lost.
struct Training {
  std::optional<int64_t> layer;
  double before = 0, after = 0;
  std::vector<double> epochs;  // means while parameters moved
};

/// Stages of training by their names in the commands' output, in their order.
struct Stage {
  const char *key, *title, *loss;
};
constexpr Stage kStages[] = {{"omniquant", "ranges learned layer by layer", "relative error of a layer's result"},
                             {"bqpo", "weights trained layer by layer", "relative error of a layer's result"},
                             {"e2e", "scales and zero points trained end to end", "nats a token"}};

/// One model as the files say it.
struct Run {
  std::string name, method;
  std::optional<int64_t> bytes;
  std::optional<double> bits, dropped, solver_s, tok_s;
  std::vector<std::pair<std::string, double>> perplexity;  // by text; infinite where the file says null
  std::map<std::string, std::vector<double>> curves;       // of tensors: the relative error after each iteration
  std::map<std::string, std::vector<Training>> training;   // by stage
  std::vector<double> influence;                           // of the source's layers, where some were dropped

  std::optional<double> on(const std::string& text) const {
    for (const auto& [name_, value] : perplexity)
      if (name_ == text) return value;
    return std::nullopt;
  }
};

std::string stem(const std::string& path) { return std::filesystem::path(path).stem().string(); }

/// What `compress --json` says of a model at its end, or a row of compress_tables.py.
void add_summary(const io::JsonObject& object, Run& run) {
  run.method = object.string("method").value_or(run.method);
  if (const auto bytes = object.integer("bytes")) run.bytes = bytes;
  if (const auto bits = object.number("effective_bits")) run.bits = bits;
  if (const auto dropped = object.number("weight_sparsity")) run.dropped = dropped;
  const nlohmann::json* gone = object.array("dropped_layers");  // whole layers, which are all alike
  const double layers = object.number("layers").value_or(0);
  if (gone != nullptr && layers > 0 && run.dropped)
    run.dropped = 1 - (1 - *run.dropped) * (1 - double(gone->size()) / layers);
  if (const auto seconds = object.number("solver_s")) run.solver_s = seconds;
}

std::vector<double> numbers(const nlohmann::json& values, const char* key, const std::string& where) {
  std::vector<double> out;
  for (const nlohmann::json& value : values) {
    if (!value.is_number()) throw Error("{}: \"{}\" must hold numbers", where, key);
    out.push_back(value.get<double>());
  }
  return out;
}

void add_training(const nlohmann::json& value, std::optional<int64_t> layer, const Stage& stage,
                  const std::string& where, Run& run) {
  const io::JsonObject object(value, where);
  const auto need = [&](const char* key) {
    const auto number = object.number(key);
    if (!number) throw Error("{}: \"{}\" of \"{}\" is missing", where, key, stage.key);
    return *number;
  };
  run.training[stage.key].push_back(
      {layer, need("before"), need("after"), numbers(object.need_array("epochs"), "epochs", where)});
}

/// Whether the line is of a stage of training, which is added.
bool add_stage_line(const io::JsonObject& line, const std::string& where, Run& run) {
  for (const Stage& stage : kStages) {
    const nlohmann::json* value = line.find(stage.key);
    if (value == nullptr) continue;
    add_training(*value, line.integer("layer"), stage, where, run);
    return true;
  }
  return false;
}

/// One line of what compress, perplexity and bench print with --json.
void add_line(const nlohmann::json& line, const std::string& where, Run& run) {
  const io::JsonObject object(line, where);
  if (object.find("tensor") != nullptr && object.find("loss") != nullptr) {
    const nlohmann::json* curve = object.array("curve");
    if (curve == nullptr || curve->empty()) return;
    run.curves[object.need_string("tensor")] = numbers(*curve, "curve", where);
  } else if (object.find("effective_bits") != nullptr && object.find("solver_s") != nullptr) {
    if (run.solver_s) throw Error("{}: a second model; give each a file of its own", where);
    add_summary(object, run);
  } else if (line.contains("ppl")) {  // which may be null
    if (object.number("act_sparsity").value_or(0) > 0)
      throw Error("{}: of skipped inputs; what is compared here are models, run dense", where);
    const auto text = object.string("text");
    const std::string sha = object.string("text_sha256").value_or("").substr(0, 8);
    // Two texts may have one name, and one text two.
    const std::string label = !text ? sha : sha.empty() ? stem(*text) : fmt::format("{} {}", stem(*text), sha);
    if (run.on(label)) throw Error("{}: {} has a perplexity already, further up", where, label);
    run.perplexity.emplace_back(label, object.number("ppl").value_or(std::numeric_limits<double>::infinity()));
  } else if (const auto bench = object.string("bench")) {
    if (*bench == "decode" && object.number("act_sparsity").value_or(0) == 0) run.tok_s = object.number("tok_s");
  } else if (const nlohmann::json* influence = object.array("block_influence")) {
    run.influence = numbers(*influence, "block_influence", where);
  } else if (object.find("figure") != nullptr) {
    return;  // a file that compress drew
  } else if (!add_stage_line(object, where, run)) {
    throw Error("{}: neither of `compress`, `perplexity` nor `bench` with --json", where);
  }
}

/// The rows of a file of scripts/compress_tables.py.
std::vector<Run> rows_of(const nlohmann::json& table, const std::string& path) {
  std::vector<Run> runs;
  const io::JsonObject top(table, path);
  size_t number = 0;
  for (const nlohmann::json& row : top.need_array("rows")) {
    const std::string where = fmt::format("{}, row {}", path, ++number);
    const io::JsonObject object(row, where);
    Run run;
    run.name = object.need_string("key");
    add_summary(object, run);
    if (const nlohmann::json* texts = object.object("perplexity"))
      for (const auto& [text, score] : texts->items()) {
        const io::JsonObject of_text(score, where);
        run.perplexity.emplace_back(text, of_text.number("ppl").value_or(std::numeric_limits<double>::infinity()));
      }
    if (const nlohmann::json* influence = object.array("block_influence"))
      run.influence = numbers(*influence, "block_influence", where);
    for (const Stage& stage : kStages) {
      const nlohmann::json* values = object.array(stage.key);
      if (values == nullptr) continue;
      const bool whole = stage.key == std::string_view("e2e");
      int64_t layer = 0;
      for (const nlohmann::json& value : *values)
        add_training(value, whole ? std::nullopt : std::optional(layer++), stage, where, run);
    }
    runs.push_back(std::move(run));
  }
  return runs;
}

std::vector<Run> read_runs(const std::string& path) {
  const std::string text = read_input(path);
  // One object over several lines is a table, else every line is an object.
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) throw Error("{}: is empty", path);
  const size_t end = text.find('\n', first);
  const std::string_view head = std::string_view(text).substr(first, end == std::string::npos ? end : end - first);
  if (!nlohmann::json::accept(head)) return rows_of(io::parse_json_object(text, path), path);
  Run run;
  run.name = stem(path);
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    size_t stop = text.find('\n', begin);
    if (stop == std::string::npos) stop = text.size();
    const std::string_view line = std::string_view(text).substr(begin, stop - begin);
    begin = stop + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = fmt::format("{}, line {}", path, number);
    const nlohmann::json value = io::parse_json_object(line, where);
    if (value.contains("rows") && number == 1) return rows_of(value, path);
    add_line(value, where, run);
  }
  return {run};
}

std::vector<std::string> texts_of(const std::vector<Run>& runs) {
  std::vector<std::string> texts;
  for (const Run& run : runs)
    for (const auto& [text, ppl] : run.perplexity)
      if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
  return texts;
}

/// The tensor whose curves are drawn: the asked one, else the first that any run has.
std::string drawn_tensor(const std::vector<Run>& runs, const std::string& asked) {
  for (const Run& run : runs)
    for (const auto& [tensor, curve] : run.curves)
      if (asked.empty() || tensor == asked) return tensor;
  if (!asked.empty())
    throw Error("--tensor {}: no run has a curve of it; awp's runs have them, as `compress --json` prints them", asked);
  return "";
}

std::vector<PointChart> charts_of(const std::vector<Run>& runs, const std::string& tensor) {
  std::vector<PointChart> charts;
  if (!tensor.empty()) {
    PointChart& chart = charts.emplace_back();
    chart.title = fmt::format("{}: ||(W - Theta) C^(1/2)|| / ||W|| (AWP, Figure 1)", tensor);
    chart.x_axis = "iteration";
    chart.y_axis = "relative error";
    for (const Run& run : runs) {
      const auto found = run.curves.find(tensor);
      if (found == run.curves.end()) continue;
      PointChart::Series& series = chart.series.emplace_back();
      series.name = run.name;
      series.joined = true;
      for (size_t t = 0; t < found->second.size(); ++t) series.points.emplace_back(double(t), found->second[t]);
    }
  }
  for (const Run& run : runs) {
    if (!run.influence.empty()) {
      PointChart& chart = charts.emplace_back();
      chart.title = fmt::format("{}: influence of the source's layers (ShortGPT): 1 - cos(in, out)", run.name);
      chart.x_axis = "layer";
      chart.y_axis = "block influence";
      PointChart::Series& series = chart.series.emplace_back(PointChart::Series{"layers", {}, false});
      for (size_t layer = 0; layer < run.influence.size(); ++layer)
        series.points.emplace_back(double(layer), run.influence[layer]);
    }
    for (const Stage& stage : kStages) {
      const auto found = run.training.find(stage.key);
      if (found == run.training.end()) continue;
      PointChart& chart = charts.emplace_back();
      chart.title = fmt::format("{}: {} ({})", run.name, stage.title, stage.key);
      chart.x_axis = "epoch: first and last point as measured, between them each epoch's mean";
      chart.y_axis = stage.loss;
      for (const Training& one : found->second) {
        PointChart::Series& series = chart.series.emplace_back();
        series.name = one.layer ? fmt::format("layer {}", *one.layer) : "net";
        series.joined = true;
        series.points.emplace_back(0, one.before);
        for (size_t e = 0; e < one.epochs.size(); ++e) series.points.emplace_back(double(e) + 0.5, one.epochs[e]);
        series.points.emplace_back(double(one.epochs.size()), one.after);
      }
    }
  }
  for (const std::string& text : texts_of(runs)) {
    PointChart chart;
    chart.title = fmt::format("Perplexity on {} against size", text);
    chart.x_axis = "MiB on disk";
    chart.y_axis = "perplexity";
    for (const Run& run : runs)
      if (run.bytes && std::isfinite(run.on(text).value_or(INFINITY)))
        chart.series.push_back({run.name, {{double(*run.bytes) / double(1 << 20), *run.on(text)}}, false});
    if (!chart.series.empty()) charts.push_back(std::move(chart));
  }
  if (charts.empty())
    throw Error("--svg: nothing to draw: no run has a curve, a stage of training, or a size and a perplexity");
  return charts;
}

void print_table(const std::vector<Run>& runs) {
  const std::vector<std::string> texts = texts_of(runs);
  size_t width = 4;
  for (const Run& run : runs) width = std::max(width, run.name.size());
  const auto cell = [](const std::optional<double>& value, const char* form) {
    return value ? fmt::format(fmt::runtime(form), *value) : std::string("-");
  };
  std::string head = fmt::format("{:<{}}{:>11}{:>8}{:>9}", "run", width, "size", "bits", "dropped");
  std::vector<size_t> widths;
  for (const std::string& text : texts) {
    widths.push_back(std::max<size_t>(11, text.size() + 2));
    head += fmt::format("{:>{}}", printable(text), widths.back());
  }
  print(head + fmt::format("{:>11}{:>10}\n", "tokens/s", "solver s"));
  for (const Run& run : runs) {
    std::string line =
        fmt::format("{:<{}}{:>11}{:>8}{:>9}", printable(run.name), width, run.bytes ? human_bytes(*run.bytes) : "-",
                    cell(run.bits, "{:.3f}"), run.dropped ? fmt::format("{:.1f}%", 100 * *run.dropped) : "-");
    for (size_t i = 0; i < texts.size(); ++i)
      line += fmt::format("{:>{}}", cell(run.on(texts[i]), "{:.4g}"), widths[i]);
    print(line + fmt::format("{:>11}{:>10}\n", cell(run.tok_s, "{:.1f}"), cell(run.solver_s, "{:.1f}")));
  }
}

Json json_of(const Run& run) {
  Json out = {{"run", run.name}};
  const auto put = [&](const char* key, const auto& value) {
    if (value) out[key] = *value;
  };
  if (!run.method.empty()) out["method"] = run.method;
  put("bytes", run.bytes);
  put("effective_bits", run.bits);
  put("weight_sparsity", run.dropped);
  if (!run.perplexity.empty()) {
    Json texts = Json::object();
    for (const auto& [text, ppl] : run.perplexity) texts[text] = ppl;
    out["perplexity"] = texts;
  }
  put("tok_s", run.tok_s);
  put("solver_s", run.solver_s);
  return out;
}

int report(const Options& options) {
  check_common(options);
  if (!options.svg.empty()) check_out("--svg", options.svg);
  std::vector<Run> runs;
  for (const std::string& file : options.files)
    for (Run& run : read_runs(file)) runs.push_back(std::move(run));
  const std::string tensor = drawn_tensor(runs, options.tensor);
  if (!options.svg.empty()) io::write_file_atomically(options.svg, draw(charts_of(runs, tensor)));
  if (options.json)
    for (const Run& run : runs) print_json(json_of(run));
  else
    print_table(runs);
  return 0;
}

}  // namespace

Action add_report(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "report",
      "Compare runs: size, bits, perplexity, tokens/s and solver seconds side by side. A file holds what `compress`, "
      "`perplexity` and `bench --what decode` printed with --json about one model, one after the other, or is a table "
      "of "
      "scripts/compress_tables.py.");
  command->add_option("RUN", options->files, "files of JSON lines, or tables; - is standard input")->required();
  command
      ->add_option("--svg", options->svg,
                   "draw perplexity against size, the solver's error by iteration, what each stage of training "
                   "lost by epoch, and the influence of layers where some were dropped")
      ->type_name("FILE");
  command->add_option("--tensor", options->tensor, "whose error is drawn; default: the first that has a curve")
      ->type_name("NAME");
  add_common(*command, *options);
  return [options, command] {
    if (options->svg.empty()) refuse_given(*command, {"--tensor"}, "--svg");
    return report(*options);
  };
}

}  // namespace lacuna::cli
