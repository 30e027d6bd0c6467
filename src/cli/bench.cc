// src/cli/bench.cc - `bench`: how fast a model and its linear layers run, against this machine's memory.
#include "eval/bench.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "cli/command.h"
#include "cli/cuda_bench.h"
#include "cli/profile.h"
#include "cli/scratch.h"
#include "cli/sparsity.h"
#include "cli/spqt.h"
#include "cli/weights.h"
#include "core/error.h"
#include "core/machine.h"
#include "core/say.h"
#include "eval/bandwidth.h"
#include "model/synth.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, synthetic, layout = "q4_K", head_layout = "q6_K", scratch, kv = "f16", prepare = "auto";
  std::vector<std::string> what = {"linear", "decode", "prefill"};
  SparsityFlags sparsity;
  ProfileFlags profile;
  WeightFlags weights;
  bool explain = false;
  int runs = 10;
  int64_t prompt = 512, tokens = 1, n_layers = 0;
  std::vector<int64_t> contexts = {0}, gens = {128};
  uint64_t seed = 0;
  bool spqt = false;
  std::vector<std::string> parts;
  std::string svg;
  GpuFlags gpu;
  bool tune = false, uneven_rows = false, beside_dense = false;
};

/// A file with random weights.
std::unique_ptr<ScratchFile> synthetic_file(const Options& options, ThreadPool& pool) {
  return std::make_unique<ScratchFile>(options.scratch, [&](const std::string& name) {
    model::synthesize(model::find_shape(options.synthetic), name,
                      {.layout = layout_named("--layout", options.layout),
                       .head_layout = layout_named("--head-layout", options.head_layout),
                       .params = options.weights.params(layout_named("--layout", options.layout)),
                       .weight_sparsity = options.weights.sparsity,
                       .seed = options.seed,
                       .n_layers = options.n_layers,
                       .progress = true},
                      pool);
  });
}

/// Prints rows as they come: JSON objects or lines of a table.
class Report {
 public:
  Report(const Options& options, std::string shape, double ceiling_gb_s)
      : options_(options), shape_(std::move(shape)), ceiling_(ceiling_gb_s) {}
  void add(const eval::BenchRow& row, double load_s) {
    if (!options_.json) {
      if (!std::exchange(headed_, true)) print_head();
      print(fmt::format(
          "{:<8} {:<28} {:<12} {:>10.3f} {:>9.3f} {:>9.3f} {:>8.2f} {:>5.0f}% {:>9} {:>10.1f} {:>8}\n", row.bench,
          row.label(), row.layout, row.median_ms, row.min_ms, row.max_ms, row.gb_s(), 100 * row.gb_s() / ceiling_,
          row.access_ceiling_gb_s ? fmt::format("{:.0f}%", 100 * row.gb_s() / *row.access_ceiling_gb_s) : "", row.tok_s,
          row.tflops ? fmt::format("{:.3f}", *row.tflops) : ""));
      return;
    }
    Json out = {{"bench", row.bench},
                {"what", row.what},
                {"shape", shape_},
                {"layout", row.layout},
                {"act_sparsity", row.act_sparsity},
                {"device", options_.device},
                {"threads", options_.threads},
                {"median_ms", row.median_ms},
                {"min_ms", row.min_ms},
                {"max_ms", row.max_ms},
                {"runs", row.runs},
                {"bytes", row.bytes},
                {"gb_s", row.gb_s()},
                {"ceiling_gb_s", ceiling_},
                {"tok_s", row.tok_s},
                {"checked", row.checked},
                {"deviation", row.deviation}};
    if (row.weight_sparsity) out["weight_sparsity"] = *row.weight_sparsity;
    if (row.tflops) out["m"] = row.m;
    if (row.n > 0) out["n"] = row.n, out["k"] = row.k;
    if (row.access_ceiling_gb_s) out["access_ceiling_gb_s"] = *row.access_ceiling_gb_s;
    if (row.tflops) out["tflops"] = *row.tflops;
    if (load_s > 0) out["load_s"] = load_s;
    out["isa"] = kernels::isa_name();
    out["peak_memory_bytes"] = peak_memory_bytes();
    print_json(out);
  }

 private:
  /// With the first row, so that an error before it leaves stdout empty.
  void print_head() const {
    print(fmt::format("{}, {} threads, {}, memory reads {:.1f} GB/s\n", shape_, options_.threads, kernels::isa_name(),
                      ceiling_));
    print(fmt::format("{:<8} {:<28} {:<12} {:>10} {:>19} {:>8} {:>6} {:>9} {:>10} {:>8}\n", "bench", "what", "layout",
                      "median ms", "min .. max ms", "GB/s", "of max", "of access", "tokens/s", "TFLOP/s"));
  }
  const Options& options_;
  std::string shape_;
  double ceiling_;
  bool headed_ = false;
};

/// The memory read rate, measured by a child process so that its buffer does not count as this one's memory. Must run
/// while this process has one thread.
double measure_ceiling(int threads) {
  int ends[2];
  if (::pipe(ends) != 0) throw Error("no pipe: {}", std::strerror(errno));
  const pid_t child = ::fork();
  if (child < 0) throw Error("no further process can be started: {}", std::strerror(errno));
  if (child == 0) {  // answers with the rate's bytes, or 0 and a reason
    double rate = 0;
    std::string reason;
    try {
      ThreadPool pool(threads);
      rate = eval::measure_read_gb_s(pool);
    } catch (const Error& error) {
      reason = error.what();
    } catch (const std::exception&) {  // reported below as a lack of memory
    }
    const std::string answer = std::string(reinterpret_cast<const char*>(&rate), sizeof(rate)) + reason;
    ::_exit(::write(ends[1], answer.data(), answer.size()) == ssize_t(answer.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string answer;
  char part[256];
  for (ssize_t got; (got = ::read(ends[0], part, sizeof(part))) > 0;) answer.append(part, size_t(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  double rate = 0;
  if (answer.size() >= sizeof(rate)) std::memcpy(&rate, answer.data(), sizeof(rate));
  if (answer.size() > sizeof(rate))
    throw Error("the memory read rate could not be measured: {}", answer.substr(sizeof(rate)));
  if (!(rate > 0))
    throw Error("the memory read rate could not be measured: it needs {} of free memory",
                human_bytes(std::max(int64_t{1} << 30, 4 * last_level_cache_bytes())));
  return rate;
}

bool asked(const Options& options, const char* name) {
  return std::find(options.what.begin(), options.what.end(), name) != options.what.end();
}

/// Throws Error for a shape that is not known.
void check_shape(const Options& options) {
  if (asked(options, "decode") || asked(options, "prefill"))
    model::find_shape(options.synthetic);
  else
    model::linear_layers(options.synthetic);
}

/// Throws Error for a flag that says how a model runs on the CPU.
void refuse_flags_of_the_cpu(const Options& options) {
  for (const auto& [flag, given] : {std::pair{"--kv", options.kv != "f16"}, {"--prepare", options.prepare != "auto"}})
    if (given) throw Error("{} is of --device cpu so far; leave it out with cuda", flag);
}

int report_spqt(const Options& options) {
  const bool on_cuda = options.device == "cuda";
  if (options.tune) throw Error("--tune finds the plans of --what decode; --spqt does not take it");
  if (on_cuda) {
    refuse_flags_of_the_cpu(options);
    if (options.sparsity.sparse()) throw Error("--spqt on cuda leaves out shares of its own; leave out --act-sparsity");
    if (options.profile.deterministic) throw Error("--spqt on cuda adds in any order; leave out --deterministic");
    if (!options.profile.path.empty()) throw Error("--spqt on cuda tunes each product itself; leave out --profile");
    if (options.gpu.layers > 0) throw Error("--spqt runs whole models on the device; leave out --gpu-layers");
    refuse_split(options.gpu, "--spqt");
  } else {
    check_common(options);
  }
  SpqtRequest request{.common = options,
                      .model = options.model,
                      .synthetic = options.synthetic,
                      .parts = options.parts,
                      .svg = options.svg,
                      .scratch = options.scratch,
                      .runs = options.runs,
                      .gen = options.gens.front(),
                      .n_layers = options.n_layers,
                      .seed = options.seed,
                      .kv = parse_kv(options.kv),
                      .sparsity = options.sparsity,
                      .gpu = options.gpu};
  check_spqt(request);
  if (on_cuda) return run_spqt(request);
  request.ceiling_gb_s = measure_ceiling(options.threads);
  const MachinePlans plans = load_plans(options.profile, options.threads);
  request.plans = &plans.plans;
  request.deterministic = plans.deterministic;
  return run_spqt(request);
}

/// A folder's or file's own name.
std::string name_of_model(const std::string& path) {
  return std::filesystem::path(path).lexically_normal().filename().string();
}

int bench_on_cuda(const Options& options) {
  refuse_flags_of_the_cpu(options);
  if (options.uneven_rows && !asked(options, "linear"))
    throw Error("--uneven-rows is of the linear layers' random weights; ask for --what linear");
  CudaBenchRequest request{.common = options,
                           .path = options.model,
                           .synthetic = options.synthetic,
                           .shape = options.synthetic.empty() ? name_of_model(options.model) : options.synthetic,
                           .layout = options.layout,
                           .what = options.what,
                           .sparsity = options.sparsity,
                           .runs = options.runs,
                           .tokens = options.tokens,
                           .n_layers = options.n_layers,
                           .prompt = options.prompt,
                           .gens = options.gens,
                           .contexts = options.contexts,
                           .seed = options.seed,
                           .params = options.synthetic.empty()
                                         ? layout::Params{}
                                         : options.weights.params(layout_named("--layout", options.layout)),
                           .weight_sparsity = options.weights.sparsity,
                           .uneven_rows = options.uneven_rows,
                           .explain = options.explain,
                           .profile = options.profile,
                           .tune = options.tune,
                           .beside_dense = options.beside_dense,
                           .gpu = options.gpu};
  check_cuda_bench(request);
  if (!options.synthetic.empty()) check_shape(options);
  std::unique_ptr<ScratchFile> synthetic;
  if (!options.synthetic.empty() && (asked(options, "decode") || asked(options, "prefill"))) {
    const cuda::Device there(options.gpu.options());  // an error comes before the work
    ThreadPool pool(options.threads);
    synthetic = synthetic_file(options, pool);
    request.path = synthetic->path();
  }
  return run_cuda_bench(request);
}

int bench(const Options& options) {
  if (options.device == "cuda") return bench_on_cuda(options);
  if (options.uneven_rows) throw Error("--uneven-rows is of --device cuda");
  if (options.tune) throw Error("--tune is of --device cuda; on the CPU `lacuna tune MODEL` makes a profile");
  check_common(options);
  if (options.sparsity.sparse() && (asked(options, "prefill") || options.tokens > 1))
    throw Error(
        "--act-sparsity is of one token, a prompt runs dense: ask for --what decode or --what linear, without "
        "--tokens");
  if (options.synthetic.empty()) open_weights(options.model, options);  // what cannot be opened fails before the clock
  const double ceiling = measure_ceiling(options.threads);
  std::unique_ptr<ScratchFile> synthetic;
  if (!options.synthetic.empty()) {
    ThreadPool pool(options.threads);
    synthetic = synthetic_file(options, pool);
  }
  const std::string path = synthetic ? synthetic->path() : options.model;
  const std::string shape = synthetic ? options.synthetic : name_of_model(path);
  if (options.sparsity.sparse()) check_can_skip(io::Checkpoint::open(path, options.threads));
  const MachinePlans plans = load_plans(options.profile, options.threads);
  const eval::BenchOptions wanted{
      .runs = options.runs,
      .prepare = options.prepare == "auto" ? kernels::Prepare::automatic : kernels::Prepare::in_place,
      .act_sparsity = options.sparsity.act_sparsity,
      .plans = &plans.plans,
      .deterministic = plans.deterministic};
  Report report(options, shape, ceiling);

  if (asked(options, "decode") || asked(options, "prefill")) {
    const LoadedModel model = load_model(path, options, plans.load_options(wanted.prepare));
    const kernels::KvType kv = parse_kv(options.kv);
    const auto thresholds = thresholds_of_bench(model, path, options.synthetic, options.sparsity);
    const auto time_tokens = [&] {
      for (const int64_t context : options.contexts)
        for (const int64_t gen : options.gens)
          report.add(eval::bench_decode(*model.decoder, model.checkpoint, gen, context, kv, wanted), model.load_s);
    };
    if (thresholds && options.beside_dense) time_tokens();
    if (thresholds)
      model.decoder->set_sparsity(model::SparsityOptions{*thresholds, options.sparsity.dense_prefix, false});
    if (options.explain)
      say("{}{}{}", model.decoder->explain(), explain_plans(model.checkpoint, plans), explain_sparsity(model, plans));
    if (asked(options, "prefill"))
      report.add(eval::bench_prefill(*model.decoder, model.checkpoint, options.prompt, kv, wanted), model.load_s);
    if (asked(options, "decode")) time_tokens();
    if (!options.json)
      print(fmt::format("load {:.2f} s, prepared copies {}, peak memory {}\n", model.load_s,
                        human_bytes(model.decoder->prepared_bytes()), human_bytes(peak_memory_bytes())));
  }
  // Last: its copies of small models would count as the memory of the rows above.
  if (asked(options, "linear")) {
    const io::Checkpoint checkpoint = io::Checkpoint::open(path, options.threads);
    if (options.explain && options.what.size() == 1) say("{}", explain_plans(checkpoint, plans));
    ThreadPool pool(options.threads);
    const auto rows = options.tokens == 1 ? eval::bench_linear(checkpoint, pool, wanted)
                                          : eval::bench_gemm(checkpoint, pool, options.tokens, wanted);
    for (const eval::BenchRow& row : rows) report.add(row, 0);
  }
  return 0;
}

}  // namespace

Action add_bench(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "bench",
      "Time a model: its linear layers alone, decoding, prefill. Results are checked against the reference before the "
      "clock starts; the memory read rate is measured first and is the ceiling that GB/s are compared with (of max). "
      "Where columns are skipped, the rate at which memory gives random columns of these lengths is measured too (of "
      "access).");
  CLI::Option* model = command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder");
  CLI::Option* synthetic =
      command
          ->add_option("--synthetic", options->synthetic,
                       "random weights of a known shape instead of a model, see `lacuna synth --help`; of cuda and "
                       "linear also NxK, such as 4096x4096: copies of one matrix, more than a cache holds")
          ->excludes(model)
          ->type_name("SHAPE");
  command
      ->add_option("--what", options->what,
                   "what to time, separated by commas: linear (all linear layers of one token, then the head; "
                   "with --act-sparsity random inputs are skipped), decode, prefill")
      ->delimiter(',')
      ->check(CLI::IsMember({"linear", "decode", "prefill"}))
      ->capture_default_str()
      ->type_name("LIST");
  CLI::Option* runs = command->add_option("--runs", options->runs, "timed repetitions; the median is reported")
                          ->check(CLI::Range(1, 100000))
                          ->capture_default_str()
                          ->type_name("R");
  command->add_option("--prompt", options->prompt, "of --what prefill: tokens of the prompt")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("N");
  CLI::Option* gen =
      command
          ->add_option("--gen", options->gens,
                       "of --what decode: tokens decoded in one run; several, separated by commas: one after the other")
          ->delimiter(',')
          ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
          ->capture_default_str()
          ->type_name("N");
  command
      ->add_option(
          "--context", options->contexts,
          "of --what decode: tokens already in the cache when it begins; 10 is how SpQt's paper measures; several, "
          "separated by commas: one after the other")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("C");
  command
      ->add_option("--tokens", options->tokens,
                   "rows M of --what linear; above 1 each group of the first layer is timed alone")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("M");
  add_kv(*command, options->kv);
  add_sparsity(*command, options->sparsity);
  add_profile(*command, options->profile);
  command->add_flag("--explain", options->explain,
                    "print to stderr which kernels run each group of weights, their plans and which inputs run sparse");
  command
      ->add_option("--prepare", options->prepare,
                   "auto: repack weights where that is faster; in_place: read them from the mapped file")
      ->check(CLI::IsMember({"auto", "in_place"}))
      ->capture_default_str()
      ->type_name("HOW");
  constexpr const char* kSpqt = "SpQt's evaluation";
  CLI::Option* spqt = command->add_flag(
      "--spqt", options->spqt,
      "print the tables and figures of SpQt's evaluation for this machine, instead of --what. Table 2 decodes with the "
      "model in f16, q4_K and zz4_k, made from MODEL where it is in another layout; --runs is then 3 and --gen 32 "
      "unless "
      "they are given");
  spqt->group(kSpqt);
  command
      ->add_option(
          "--parts", options->parts,
          "only these, separated by commas: table2 (decoding after 10 tokens, dense and sparse, on cuda with plans "
          "tuned for each "
          "row; needs MODEL or --synthetic), fig7 (all linear layers of the model or, without one, of the paper's; "
          "with the "
          "baselines B1 and B2), fig8 (latency of the matrices of Llama-3-8B, Llama-2-13B and Llama-2-70B), fig9 "
          "(the same beside B1, B2 and, on cuda, a column-parallel kernel), fig10 (dense sweep)")
      ->delimiter(',')
      ->needs(spqt)
      ->check(CLI::IsMember(spqt_parts()))
      ->type_name("LIST")
      ->group(kSpqt);
  command->add_option("--svg", options->svg, "draw the parts as bar charts too")
      ->needs(spqt)
      ->type_name("FILE")
      ->group(kSpqt);
  command->add_option("--layout", options->layout, "layout of the random matrices")
      ->check(layout_name())
      ->needs(synthetic)
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Random weights");
  command->add_option("--head-layout", options->head_layout, "layout of the random output head")
      ->check(layout_name())
      ->needs(synthetic)
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Random weights");
  command->add_option("--layers", options->n_layers, "only so many layers; 0: all")
      ->needs(synthetic)
      ->check(CLI::Range(int64_t{0}, int64_t{1000}))
      ->capture_default_str()
      ->type_name("N")
      ->group("Random weights");
  add_weights(*command, options->weights, synthetic);
  add_seed(*command, options->seed, "start of the random weights")->needs(synthetic)->group("Random weights");
  command
      ->add_option(
          "--scratch", options->scratch,
          "folder for the file of random weights, which is removed at the end; default: the system's folder for "
          "temporary files")
      ->needs(synthetic)
      ->type_name("DIR")
      ->group("Random weights");
  command
      ->add_flag("--uneven-rows", options->uneven_rows,
                 "cuda, linear, gs layouts: quarters of a matrix's outputs drop 0.4, 1.2, 1.6 and 0.8 times "
                 "--weight-sparsity")
      ->needs(synthetic)
      ->group("Random weights");
  command
      ->add_flag("--tune", options->tune,
                 "cuda, decode: find the fastest plans first, a few seconds, instead of reading a profile")
      ->group("This machine");
  command->add_flag("--beside-dense", options->beside_dense,
                    "of --what decode with --act-sparsity: dense tokens of the same load of the model too, first");
  add_gpu(*command, options->gpu);
  add_common(*command, *options);
  return [=] {
    check_gpu(*command, *options);
    if (options->beside_dense) {
      if (options->spqt || !asked(*options, "decode"))
        throw Error("--beside-dense is of --what decode; {}",
                    options->spqt ? "--spqt does not take it" : "ask for it too");
      if (!options->sparsity.sparse()) throw Error("--beside-dense needs --act-sparsity");
    }
    if (!options->spqt) check_sparsity(*command);
    if (options->spqt) {
      if (runs->count() == 0) options->runs = 3;
      if (gen->count() == 0) options->gens = {32};
      if (options->gens.size() > 1) throw Error("--spqt decodes one number of tokens; give --gen one");
      return report_spqt(*options);
    }
    if (model->count() + synthetic->count() == 0) throw Error("nothing to time: give MODEL or --synthetic SHAPE");
    return bench(*options);
  };
}

}  // namespace lacuna::cli
