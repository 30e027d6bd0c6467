// src/kernels/cuda/gemv.cu - choice and launch of the GEMV kernels.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/prepared.h"

namespace lacuna::cuda {
namespace {

std::span<const GemvTable> tables() {
  static const GemvTable kTables[] = {gemv_zz2_k(), gemv_zz3_k(), gemv_zz4_k(), gemv_zz5_k(), gemv_zz6_k(), gemv_zz8()};
  return kTables;
}

std::span<const GemvKernel> kernels_of(const layout::Layout& layout) {
  for (const GemvTable& table : tables())
    if (table.id == layout.id) return table.kernels;
  column_form(layout);  // throws, naming those that there are
  throw Error("no CUDA kernel reads {}", layout.name);
}

// A warp's share of a list is computed in 32 bits: inputs (prepared.cc) * segments * warps.
static_assert(kSegmentColumns * kMostSegments * kMostSegments * 8 < int64_t{1} << 32);
constexpr int64_t kMostRows = 65535;

int least_segments(int64_t K) { return int((K + kSegmentColumns - 1) / kSegmentColumns); }

int64_t segment_columns(int64_t K, int segments) { return (K + segments - 1) / segments; }

GemvParams make_params(const ColumnForm& form, const GemvPlan& plan, const GemvArgs& args) {
  GemvParams p{};
  p.codes = args.weights.codes, p.headers = args.weights.headers;
  p.x = args.x, p.up = args.up, p.norms = args.norms, p.threshold = args.threshold;
  p.list = args.list, p.count = args.count;
  p.y = args.y, p.zero = args.zero;
  p.K = int(args.weights.K), p.segments = plan.segments;
  p.segment_columns = int(segment_columns(args.weights.K, plan.segments));
  p.share_factor = share_factor(unsigned(plan.segments * plan.warps));
  const auto early = [&](float share, int64_t bytes) { return unsigned(share * float(p.segment_columns * bytes)); };
  p.early_codes = early(plan.early_codes, form.code_bytes);
  p.early_headers = early(plan.early_headers, form.header_bytes);
  p.zero_quads = unsigned(args.zero_count / 4);
  p.workspace = args.workspace;
  p.has_sibling = args.has_sibling, p.is_sibling = args.is_sibling;
  return p;
}

}  // namespace

std::span<const GemvPlan> kernel_plans(const layout::Layout& layout) {
  static const std::map<layout::Id, std::vector<GemvPlan>> kPlans = [] {
    std::map<layout::Id, std::vector<GemvPlan>> plans;
    for (const GemvTable& table : tables())
      for (const GemvKernel& kernel : table.kernels) plans[table.id].push_back(kernel.plan);
    return plans;
  }();
  kernels_of(layout);  // throws where there are none
  return kPlans.at(layout.id);
}

GemvPlan default_plan(const DeviceInfo& device, const layout::Layout& layout, const Columns& weights, Inputs inputs) {
  GemvPlan plan = kernels_of(layout)[0].plan;
  const int64_t blocks = int64_t{device.multiprocessors} * plan.resident / plan.warps;
  // With less than half a chunk a warp, what every block has to do weighs more than what it reads.
  const int64_t most = std::clamp<int64_t>(weights.K / (plan.chunk / 2 * plan.warps), 1, kMostSegments);
  plan.segments = int(std::max<int64_t>(least_segments(weights.K),
                                        std::clamp<int64_t>(blocks / std::max<int64_t>(1, weights.rows), 1, most)));
  if (inputs != Inputs::dense) plan.early_headers = 1, plan.early_codes = 0.15f;
  return plan;
}

void launch_gemv(const Device& device, Stream& stream, const layout::Layout& layout, const GemvPlan& plan,
                 const GemvArgs& args) {
  const auto kernels = kernels_of(layout);
  const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const GemvKernel& k) {
    return k.plan.warps == plan.warps && k.plan.chunk == plan.chunk && k.plan.resident == plan.resident;
  });
  if (kernel == kernels.end()) throw Error("no CUDA kernel of {} for the plan: {}", layout.name, describe(plan));
  const int64_t K = args.weights.K;
  if (plan.segments < least_segments(K) || plan.segments > kMostSegments)
    throw Error("{} segments of {} columns; there must be {} to {}", plan.segments, K, least_segments(K),
                kMostSegments);
  if (args.up != nullptr && args.inputs == Inputs::list) throw Error("a gate's inputs are not taken from a list");
  if (args.is_sibling && args.zero != nullptr) throw Error("a sibling launch clears nothing");
  if (args.weights.rows == 0) return;
  if (args.weights.rows > kMostRows)
    throw Error("{} superblock rows; the CUDA kernels take at most {}", args.weights.rows, kMostRows);
  launch_kernel(device, stream, kernel->by_inputs[size_t(args.inputs)],
                {dim3(unsigned(plan.segments), unsigned(args.weights.rows)), plan.warps * kWarpSize},
                make_params(column_form(layout), plan, args));
}

}  // namespace lacuna::cuda
