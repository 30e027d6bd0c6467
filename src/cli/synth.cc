// src/cli/synth.cc - `synth`: a file of a known shape with random weights.
#include "model/synth.h"

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/weights.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string shape, out, layout = "q4_K", head_layout = "q6_K";
  uint64_t seed = 0;
  int64_t n_layers = 0, tile_rows = 0;
  WeightFlags weights;
};

int synth(const Options& options) {
  check_common(options);
  check_out("-o", options.out);
  const model::ModelShape& shape = model::find_shape(options.shape);
  const model::SynthOptions wanted{
      .layout = layout_named("--layout", options.layout),
      .head_layout = layout_named("--head-layout", options.head_layout),
      .params = options.weights.params(layout_named("--layout", options.layout), options.tile_rows),
      .weight_sparsity = options.weights.sparsity,
      .seed = options.seed,
      .n_layers = options.n_layers,
      .progress = true};
  ThreadPool pool(options.threads);
  const int64_t bytes = model::synthesize(shape, options.out, wanted, pool);
  if (options.json)
    print_json({{"path", options.out}, {"bytes", bytes}});
  else
    print(fmt::format("{}: {} ({} bytes)\n", options.out, human_bytes(bytes), bytes));
  return 0;
}

}  // namespace

Action add_synth(CLI::App& program) {
  auto options = std::make_shared<Options>();
  std::string names;
  for (const model::ModelShape& shape : model::known_shapes())
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  CLI::App* command = program.add_subcommand(
      "synth",
      "Write a complete GGUF file of a known model's shape with random weights, to measure speed with. llama.cpp loads "
      "it "
      "too (not opt, which it does not have, nor zigzag, gq, bm and nm24 layouts). Rows are put together from 2048 "
      "random runs of 256 "
      "weights that are "
      "encoded once, so a file takes seconds; norms are 1, the tokenizer is a stand-in of the right size.");
  command->add_option("SHAPE", options->shape, "one of " + names)->required();
  command->add_option("-o,--out", options->out, "the file to write")->required()->type_name("FILE");
  command->add_option("--layout", options->layout, fmt::format("of the matrices: {}", layout::known_names()))
      ->check(layout_name())
      ->capture_default_str()
      ->type_name("NAME");
  command->add_option("--head-layout", options->head_layout, "of the output head, or a tied model's embedding table")
      ->check(layout_name())
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--tile-rows", options->tile_rows,
                   "zigzag layouts: outputs of a column that lie together, a multiple of 256; 0: whole columns")
      ->check(tile_rows(false))
      ->capture_default_str()
      ->type_name("N");
  add_weights(*command, options->weights);
  add_seed(*command, options->seed, "start of the random numbers");
  command->add_option("--layers", options->n_layers, "only so many layers; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1000}))
      ->capture_default_str()
      ->type_name("N");
  add_common(*command, *options);
  return [options] { return synth(*options); };
}

}  // namespace lacuna::cli
