#include "cli/cuda_bench.h"

#include <fmt/format.h>

#include "core/error.h"
#include "core/say.h"
#include "eval/cuda_linear.h"
#include "model/shapes.h"

namespace lacuna::cli {
namespace {

void print_table(const CudaBenchRequest& request, const eval::CudaLinearResult& result) {
  print(fmt::format("{}, {}, driver for CUDA {}, device memory reads {:.1f} GB/s\n", request.synthetic,
                    result.device.name, result.device.driver, result.ceiling_gb_s));
  print(fmt::format("{:<8} {:<28} {:<8} {:>10} {:>19} {:>9} {:>6} {:>10} {:>9}\n", "bench", "what", "layout",
                    "median ms", "min .. max ms", "GB/s", "of max", "tokens/s", "error"));
  for (const eval::BenchRow& row : result.rows)
    print(fmt::format("{:<8} {:<28} {:<8} {:>10.4f} {:>9.4f} {:>9.4f} {:>9.1f} {:>5.0f}% {:>10.1f} {:>9.1e}\n",
                      row.bench, row.what, row.layout, row.median_ms, row.min_ms, row.max_ms, row.gb_s(),
                      100 * row.gb_s() / result.ceiling_gb_s, row.tok_s, row.deviation));
  if (const double share = eval::list_share(result); share > 0)
    print(fmt::format("a kernel of its own for each list takes {:.1f}% of the time\n", 100 * share));
}

void print_rows(const CudaBenchRequest& request, const eval::CudaLinearResult& result) {
  for (size_t i = 0; i < result.rows.size(); ++i) {
    const eval::BenchRow& row = result.rows[i];
    Json out = {{"bench", row.bench},
                {"what", row.what},
                {"shape", request.synthetic},
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
                {"deterministic", request.deterministic},
                {"plans", result.plans[i]}};
    if (row.what.ends_with("list kernels")) out["list_share"] = eval::list_share(result);
    print_json(out);
  }
}

}  // namespace

int run_cuda_bench(const CudaBenchRequest& request) {
  if (request.synthetic.empty() || request.what != std::vector<std::string>{"linear"} || request.tokens != 1)
    throw Error(
        "--device cuda runs `bench --synthetic SHAPE --what linear` of one token so far; leave the rest to --device "
        "cpu");
  ThreadPool pool(request.common.threads);
  const eval::CudaLinearResult result =
      eval::bench_cuda_linear(model::find_shape(request.synthetic), pool,
                              {.layout = layout_named("--layout", request.layout),
                               .n_layers = request.n_layers,
                               .act_sparsity = request.act_sparsity,
                               .runs = request.runs,
                               .seed = request.seed,
                               .deterministic = request.deterministic,
                               .device = {request.device, int64_t(request.memory_gib * double(int64_t{1} << 30))}});
  if (request.explain)
    for (size_t i = 0; i < result.rows.size(); ++i) say("{}: {}\n", result.rows[i].what, result.plans[i]);
  if (request.common.json)
    print_rows(request, result);
  else
    print_table(request, result);
  return 0;
}

}  // namespace lacuna::cli
