#include "cli/cuda_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/scratch.h"
#include "core/error.h"
#include "core/say.h"
#include "eval/cuda_decode.h"
#include "eval/cuda_linear.h"
#include "model/shapes.h"

namespace lacuna::cli {
namespace {

bool asked(const CudaBenchRequest& request, const char* name) {
  return std::find(request.what.begin(), request.what.end(), name) != request.what.end();
}

void print_table(const CudaBenchRequest& request, const eval::CudaLinearResult& result) {
  print(fmt::format("{}, {}, driver for CUDA {}, device memory reads {:.1f} GB/s\n", request.shape, result.device.name,
                    result.device.driver, result.ceiling_gb_s));
  print(fmt::format("{:<8} {:<28} {:<12} {:>10} {:>19} {:>9} {:>6} {:>10} {:>9}\n", "bench", "what", "layout",
                    "median ms", "min .. max ms", "GB/s", "of max", "tokens/s", "error"));
  for (const eval::BenchRow& row : result.rows)
    print(fmt::format("{:<8} {:<28} {:<12} {:>10.4f} {:>9.4f} {:>9.4f} {:>9.1f} {:>5.0f}% {:>10.1f} {:>9.1e}\n",
                      row.bench, row.label(), row.layout, row.median_ms, row.min_ms, row.max_ms, row.gb_s(),
                      100 * row.gb_s() / result.ceiling_gb_s, row.tok_s, row.deviation));
  for (size_t i = 0; i < result.shares.size(); ++i)
    if (const auto& s = result.shares[i])
      print(fmt::format(
          "{}: {:.4f} ms in linear layers ({:.0f}%), {:.4f} in attention ({:.0f}%), {:.4f} in the rest ({:.0f}%), {}"
          "each waiting for the one before\n",
          result.rows[i].label(), s->linear, 100 * s->linear / s->sum(), s->attention, 100 * s->attention / s->sum(),
          s->rest, 100 * s->rest / s->sum(),
          s->exchange > 0 ? fmt::format("{:.4f} in exchanges ({:.0f}%), ", s->exchange, 100 * s->exchange / s->sum())
                          : ""));
  if (const double share = eval::list_share(result); share > 0)
    print(fmt::format("a kernel of its own for each list takes {:.1f}% of the time\n", 100 * share));
}

/// Of whole tokens.
struct Loaded {
  double load_s = 0;
  int64_t device_bytes = 0;  // of all devices: weights, cache of the longest run and work space
};

void print_rows(const CudaBenchRequest& request, const eval::CudaLinearResult& result, const Loaded& loaded) {
  for (size_t i = 0; i < result.rows.size(); ++i) {
    const eval::BenchRow& row = result.rows[i];
    Json out = {{"bench", row.bench},
                {"what", row.what},
                {"shape", request.shape},
                {"layout", row.layout},
                {"act_sparsity", row.act_sparsity},
                {"device", request.common.device},
                {"threads", request.common.threads},
                {"median_ms", row.median_ms},
                {"min_ms", row.min_ms},
                {"max_ms", row.max_ms},
                {"runs", row.runs},
                {"bytes", row.bytes},
                {"gb_s", row.gb_s()},
                {"ceiling_gb_s", result.ceiling_gb_s},
                {"tok_s", row.tok_s},
                {"checked", row.checked},
                {"deviation", row.deviation},
                {"gpu", result.device.name},
                {"driver", result.device.driver},
                {"deterministic", request.profile.deterministic},
                {"plans", result.plans[i]}};
    if (row.weight_sparsity) {
      out["weight_sparsity"] = *row.weight_sparsity;
      out["group_size"] = request.params.group_size;
      out["uneven_rows"] = request.uneven_rows;
    }
    if (row.tflops) out["tflops"] = *row.tflops;
    if (i < result.shares.size() && result.shares[i])
      out["shares"] = {{"linear_ms", result.shares[i]->linear},
                       {"attention_ms", result.shares[i]->attention},
                       {"rest_ms", result.shares[i]->rest},
                       {"exchange_ms", result.shares[i]->exchange}};
    if (request.gpu.layers > 0) out["gpu_layers"] = request.gpu.layers;
    if (request.gpu.split()) {
      out["gpus"] = request.gpu.count;
      out["shards"] = request.gpu.shards > 0 ? request.gpu.shards : request.gpu.count;
    }
    if (loaded.load_s > 0) out["load_s"] = loaded.load_s, out["device_memory_bytes"] = loaded.device_bytes;
    if (row.what.ends_with("list kernels")) out["list_share"] = eval::list_share(result);
    print_json(out);
  }
}

void report(const CudaBenchRequest& request, const eval::CudaLinearResult& result, const Loaded& loaded = {}) {
  if (request.explain)
    for (size_t i = 0; i < result.rows.size(); ++i) say("{}: {}\n", result.rows[i].label(), result.plans[i]);
  if (request.common.json)
    print_rows(request, result, loaded);
  else
    print_table(request, result);
}

int64_t free_device_bytes(const LoadedModel& model) {
  int64_t bytes = model.gpu->free_bytes();
  for (const auto& gpu : model.more_gpus) bytes += gpu->free_bytes();
  return bytes;
}

/// Prefill and decoding, those that are asked for, on one upload of the model.
void whole_tokens(const CudaBenchRequest& request) {
  LoadedModel model = open_model(request.path, request.common);
  const bool decodes = asked(request, "decode"), prefills = asked(request, "prefill");
  const int64_t deepest = *std::max_element(request.contexts.begin(), request.contexts.end());
  const int64_t longest = *std::max_element(request.gens.begin(), request.gens.end());
  open_gpu(model, request.gpu);
  const CudaPlans plans =
      request.tune ? CudaPlans{{}, "plans found first (--tune)"} : load_cuda_plans(request.profile, model.gpu->info());
  std::optional<MachinePlans> on_cpu;
  if (request.gpu.layers > 0) on_cpu = load_plans_beside_gpu(request.profile, request.common.threads);
  const int64_t free_before = free_device_bytes(model);
  load_cuda_decoder(model,
                    {.context = std::max({decodes ? deepest + longest : 0, prefills ? request.prompt : 0,
                                          request.tune ? model::CudaDecoder::kTuneContext : 0}),
                     .progress = true,
                     .deterministic = request.profile.deterministic,
                     .plans = plans.plans,
                     .gpu_layers = request.gpu.layers,
                     .shards = request.gpu.shards,
                     .cpu = on_cpu ? on_cpu->load_options(kernels::Prepare::automatic) : model::LoadOptions{}},
                    {.layers = !request.tune, .context = decodes ? "--context, --gen" : "--prompt"});
  const Loaded loaded = {model.load_s, free_before - free_device_bytes(model)};
  // The CPU's decoder checks the other one, and finds thresholds for random weights.
  model.decoder = model::Decoder::load(
      model.checkpoint, *model.pool,
      {.prepare = request.sparsity.sparse() ? kernels::Prepare::automatic : kernels::Prepare::in_place});
  const auto thresholds = thresholds_of_bench(model, request.path, request.synthetic, request.sparsity);
  const auto check = [&] { return eval::check_cuda_decoder(*model.cuda, *model.decoder); };
  double deviation = request.tune && !prefills ? 0 : check();
  eval::CudaLinearResult result;
  result.device = model.gpu->info();
  if (prefills) {
    result.rows.push_back(eval::bench_cuda_prefill(*model.cuda, model.checkpoint, deviation,
                                                   {.tokens = request.prompt, .runs = request.runs}));
    result.plans.push_back("f16 operands of all weights, products on tensor cores");
  }
  const auto time_tokens = [&] {
    for (const int64_t depth : request.contexts)
      for (const int64_t gen : request.gens) {
        const eval::CudaDecodeOptions wanted = {.tokens = gen, .depth = depth, .runs = request.runs};
        result.shares.resize(result.rows.size());
        for (eval::BenchRow& row : eval::bench_cuda_decode(*model.cuda, model.checkpoint, deviation, wanted)) {
          result.rows.push_back(std::move(row));
          result.plans.push_back(fmt::format("{}\n{}{}", plans.source,
                                             on_cpu ? fmt::format("the CPU's layers: {}\n", on_cpu->source) : "",
                                             model.cuda->explain()));
        }
        result.shares.emplace_back(eval::bench_cuda_shares(*model.cuda, wanted));
      }
  };
  // Dense first: its plans serve where skipping does not pay.
  if (request.tune) {
    const bool has_groups = !model.cuda->tune_groups(true).empty();
    if (model.cuda->tune(true).empty() && !has_groups)
      throw Error("--tune: {} has neither zigzag nor group-sparse weights, whose plans it finds", request.shape);
    deviation = check();
  }
  if (!thresholds) model.decoder.reset();
  if (decodes && (!thresholds || request.beside_dense)) time_tokens();
  if (thresholds) {
    const model::SparsityOptions sparsity{*thresholds, request.sparsity.dense_prefix, false};
    model.cuda->set_sparsity(sparsity);
    if (request.tune) model.cuda->tune(true);
    deviation = eval::check_cuda_sparsity(*model.cuda, *model.decoder, sparsity);
    model.decoder.reset();
    time_tokens();
  }
  result.ceiling_gb_s = model.cuda->measure_read_gb_s();
  report(request, result, loaded);
}

}  // namespace

void check_cuda_bench(const CudaBenchRequest& request) {
  if (!request.profile.path.empty() && !asked(request, "decode"))
    throw Error("--profile has the plans of --what decode; the linear layers find theirs");
  if (request.tune && !asked(request, "decode")) throw Error("--tune finds the plans of --what decode; ask for it too");
  if (request.tune && (request.profile.deterministic || !request.profile.path.empty()))
    throw Error("--tune finds plans in place of those of a profile or of a fixed order; leave out {}",
                request.profile.deterministic ? "--deterministic" : "--profile");
  if (request.gpu.layers > 0 && (request.tune || asked(request, "linear")))
    throw Error("--gpu-layers splits whole tokens and prompts of a model; leave out --tune and --what linear");
  if (request.tune) refuse_split(request.gpu, "--tune");
  if (asked(request, "linear")) refuse_split(request.gpu, "--what linear");
  if (asked(request, "prefill") && request.sparsity.sparse())
    throw Error("--act-sparsity is of one token, a prompt runs dense: ask for --what decode or --what linear");
  if (asked(request, "linear") && (request.synthetic.empty() || request.tokens != 1))
    throw Error(
        "--device cuda times the linear layers of one token of --synthetic SHAPE; of a model ask for --what decode");
}

int run_cuda_bench(const CudaBenchRequest& request) {
  check_cuda_bench(request);
  if (asked(request, "decode") || asked(request, "prefill")) whole_tokens(request);
  if (!asked(request, "linear")) return 0;
  ThreadPool pool(request.common.threads);
  report(request, eval::bench_cuda_linear(model::linear_layers(request.synthetic), pool,
                                          {.layout = layout_named("--layout", request.layout),
                                           .n_layers = request.n_layers,
                                           .act_sparsity = request.sparsity.act_sparsity,
                                           .weight_sparsity = request.weight_sparsity,
                                           .group_size = request.params.group_size,
                                           .uneven_rows = request.uneven_rows,
                                           .runs = request.runs,
                                           .seed = request.seed,
                                           .deterministic = request.profile.deterministic,
                                           .device = request.gpu.options()}));
  return 0;
}

}  // namespace lacuna::cli
