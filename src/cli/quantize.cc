// src/cli/quantize.cc - `quantize`: a checkpoint in, a smaller GGUF file out.
#include "io/quantize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <map>

#include "cli/command.h"
#include "cli/profile.h"
#include "cli/weights.h"
#include "core/error.h"
#include "core/say.h"
#include "model/weight_groups.h"

namespace lacuna::cli {
namespace {

constexpr const char* kMatchSource = "zigzag";
constexpr const char* kKeepSource = "source";

struct Options : Common {
  std::string model, out, layout = "q4_K", head_layout, embedding_layout;
  std::string tile_rows = "0";
  int64_t group_size = -1;  // not given
  bool pure = false, strict = false;
};

/// --tile-rows: a number for all tensors, or what this machine's profile says of the groups that they are run in.
void set_tile_rows(const io::Checkpoint& source, const Options& options, io::QuantizeOptions& wanted) {
  if (options.tile_rows != "auto") {
    wanted.params.tile_rows = std::stoll(options.tile_rows);  // the flag's check has seen it
    return;
  }
  if (!layout::get(wanted.layout).zigzag)
    throw Error("--tile-rows auto: {} has no tiles; it is for the zigzag layouts", options.layout);
  const MachinePlans plans = load_plans({}, options.threads);
  if (!plans.profile)
    throw Error(
        "--tile-rows auto needs a profile of this machine with {} threads: quantize without it, run `lacuna tune` on "
        "the "
        "result, then quantize again",
        options.threads);
  std::map<std::string, const layout::Layout*> stored;
  for (const auto& tensor : io::plan_quantize(source, wanted).tensors) stored[tensor.name] = tensor.stored;
  for (int64_t layer = 0; layer < model::layer_count(source); ++layer) {
    for (model::WeightGroup& group : model::layer_groups(source, layer)) {
      for (kernels::WeightView& part : group.parts) part.layout = stored.at(part.name);
      const int64_t tile_rows = plans.plans.of(group.parts).tile_rows;
      for (const kernels::WeightView& part : group.parts) wanted.tensor_params[part.name].tile_rows = tile_rows;
    }
  }
}

int quantize(const Options& options) {
  check_common(options);
  check_out("-o", options.out);
  io::QuantizeOptions wanted;
  wanted.match_source = options.layout == kMatchSource;
  wanted.keep_source = options.layout == kKeepSource;
  if (wanted.keep_source && (options.tile_rows != "0" || options.group_size >= 0))
    throw Error("--layout {}: each matrix keeps its own tiles and groups; leave out --tile-rows and --group-size",
                kKeepSource);
  wanted.layout = wanted.match_source  ? layout::Id::zz4_k
                  : wanted.keep_source ? layout::Id::f32
                                       : layout_named("--layout", options.layout);
  if (!options.head_layout.empty()) wanted.head_layout = layout_named("--head-layout", options.head_layout);
  if (!options.embedding_layout.empty())
    wanted.embedding_layout = layout_named("--embedding-layout", options.embedding_layout);
  wanted.params.group_size = group_size_of(layout::get(wanted.layout), options.group_size);
  wanted.pure = options.pure;
  if (wanted.pure && (wanted.match_source || wanted.keep_source))
    throw Error("--pure: --layout {} is a mix", options.layout);
  if (wanted.keep_source && (wanted.head_layout || wanted.embedding_layout))
    throw Error("--layout {} keeps the output head and the embedding table as they are too", kKeepSource);
  wanted.strict = options.strict;

  const auto start = std::chrono::steady_clock::now();
  const io::Checkpoint source = open_weights(options.model, options);
  if (source.vocabulary().model == Vocabulary::Model::none)
    spdlog::warn("{} has no tokenizer, so the result has none: {}", options.model, kTokenizerFiles);
  set_tile_rows(source, options, wanted);
  if (const auto again = io::plan_quantize(source, wanted).requantized; !again.empty())
    spdlog::warn(
        "{} was quantized already ({}): quantizing again loses quality; start from f16, bf16 or f32 where you can",
        options.model, fmt::join(again, ", "));
  ThreadPool pool(options.threads);
  const io::QuantizeReport report = io::quantize(source, options.out, wanted, pool);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const auto fell = report.fell_back();
  if (options.json) {
    Json fallbacks = Json::array();
    for (const auto* tensor : fell)
      fallbacks.push_back({{"name", tensor->name},
                           {"wanted", tensor->wanted->name},
                           {"stored", tensor->stored->name},
                           {"k", tensor->dims.back()}});
    print_json({{"path", options.out},
                {"bytes", report.file_bytes},
                {"params", report.params},
                {"weight_bytes", report.bytes},
                {"effective_bits", report.effective_bits()},
                {"fell_back", std::move(fallbacks)},
                {"requantized", report.requantized},
                {"seconds", seconds},
                {"peak_memory_bytes", peak_memory_bytes()}});
    return 0;
  }
  std::string out;
  for (const auto* tensor : fell)
    out += fmt::format("fell back: {} rows of {} do not fit {}, stored as {}\n", printable(tensor->name),
                       tensor->dims.back(), tensor->wanted->name, tensor->stored->name);
  out += fmt::format("{}: {} ({} bytes), {:.3f} bits per weight, {} of {} tensors fell back\n", options.out,
                     human_bytes(report.file_bytes), report.file_bytes, report.effective_bits(), fell.size(),
                     report.tensors.size());
  print(out);
  say("{:.1f} s, peak memory {}\n", seconds, human_bytes(peak_memory_bytes()));
  return 0;
}

}  // namespace

Action add_quantize(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "quantize",
      "Store a model's matrices in fewer bits, as one GGUF file. Vectors stay f32; the output head (a tied model's "
      "embedding table) gets q6_K where the layout asked for has fewer bits, as llama.cpp does; its _S and _M mixes of "
      "further layouts are not made. The zigzag layouts (zz...) are for skipping inputs that are not active: embedding "
      "table "
      "and head get what the K-quant of the same bits would give them. So do they with gq (codes in groups along a "
      "row, "
      "rounded to nearest) and with bm and nm24_q4, which drop the weights that are 0 in a pruned model. Rows that do "
      "not fit a layout fall back and are named.");
  command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder")->required();
  command->add_option("-o,--out", options->out, "the file to write; it appears when it is complete")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--layout", options->layout,
                   fmt::format("one of {}; or {}: each matrix in the zigzag layout that has its bits (q4_K: zz4_k, "
                               "q6_K: zz6_k, and so on), embedding table and head as they are; or {}: every matrix as "
                               "it is stored, so that a folder that another program has quantized (GPTQ, AWQ, "
                               "compressed-tensors) or a split model becomes one file with the same values",
                               layout::known_names(), kMatchSource, kKeepSource))
      ->check([](const std::string& text) {
        return text == kMatchSource || text == kKeepSource ? std::string() : layout_name()(text);
      })
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option(
          "--tile-rows", options->tile_rows,
          "zigzag layouts: outputs of a column that lie together, a multiple of 256; 0: whole columns; auto: as "
          "`lacuna tune` found best on this machine, so that `run --prepare in_place` can map the file as it is")
      ->check(tile_rows(true))
      ->capture_default_str()
      ->type_name("N|auto");
  add_group_size(*command, options->group_size);
  CLI::Option* pure =
      command->add_flag("--pure", options->pure,
                        "every matrix in --layout, head and embedding too (with zz4_k: these two in q4_K, and so on)");
  command
      ->add_option("--head-layout", options->head_layout,
                   "layout of the output head; default: q6_K, or --layout where that has more bits")
      ->check(layout_name())
      ->excludes(pure)
      ->type_name("NAME");
  command
      ->add_option("--embedding-layout", options->embedding_layout, "layout of the embedding table; default: --layout")
      ->check(layout_name())
      ->excludes(pure)
      ->type_name("NAME");
  command->add_flag("--strict", options->strict, "refuse, before anything is written, when a tensor would fall back");
  add_common(*command, *options);
  return [options] { return quantize(*options); };
}

}  // namespace lacuna::cli
