#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/baselines.h"
#include "kernels/cuda/frag_zz4_k.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/prepared.h"
#include "layout/q4_K.h"

namespace lacuna::cuda {
namespace {

constexpr int kRowsOfWarp = 4;
constexpr int64_t kColumnsOfWarp = 8;  // of a list with half of 4096 inputs: 4

/// Lane l has weights 8l to 8l + 7 of each superblock: of one group, in 8 bytes' low or high nibbles.
__global__ void __launch_bounds__(kWarpSize)
    skipping_rows(const std::byte* weights, int N, int K, const float* x, float threshold, float* y) {
  launch_dependents();
  wait_for_predecessors();
  const int lane = int(threadIdx.x), first = int(blockIdx.x) * kRowsOfWarp, blocks = K / 256;
  const int group = lane / 4, byte = group / 2 * 32 + lane % 4 * 8, shift = group % 2 * 4;
  float sums[kRowsOfWarp] = {};
  for (int b = 0; b < blocks; ++b) {
    float inputs[8];
    const float4* const from = reinterpret_cast<const float4*>(x + b * 256 + lane * 8);
    *reinterpret_cast<float4*>(inputs) = __ldcg(from), *reinterpret_cast<float4*>(inputs + 4) = __ldcg(from + 1);
    for (int r = 0; r < kRowsOfWarp && first + r < N; ++r) {
      const std::byte* const block = weights + (size_t(first + r) * size_t(blocks) + size_t(b)) * 144;
      const uint4 header = load_stream(reinterpret_cast<const uint4*>(block));
      const uint2 codes = load_stream(reinterpret_cast<const uint2*>(block + 16 + byte));
      // Six bits of eight scales and eight mins (layout/six_bit.h); those of groups 4 to 7 end in the bytes before.
      const int at = group % 4 * 8;
      const uint32_t low_scale = header.y >> at & 63, low_min = header.z >> at & 63;
      const uint32_t high = header.w >> at & 255, top_scale = header.y >> (at + 2) & 48,
                     top_min = header.z >> (at + 2) & 48;
      const float scale = float(group < 4 ? low_scale : (high & 15) | top_scale);
      const float min = float(group < 4 ? low_min : (high >> 4) | top_min);
      const float d = __low2float(as_half2(header.x)) * scale, m = __high2float(as_half2(header.x)) * min;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (fabsf(inputs[i]) < threshold) continue;
        const uint32_t code = (i < 4 ? codes.x : codes.y) >> (i % 4 * 8 + shift) & 15;
        sums[r] = fmaf(inputs[i], d * float(code) - m, sums[r]);
      }
    }
  }
  for (int r = 0; r < kRowsOfWarp && first + r < N; ++r) {
    for (int step = kWarpSize / 2; step >= 1; step /= 2) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], step);
    if (lane == 0) y[first + r] = sums[r];
  }
}

void launch_columns(const Device& device, Stream& stream, void (*kernel)(GemvParams), const GemvPlan& plan,
                    const GemvArgs& args) {
  if (args.weights.rows == 0) return;
  if (args.up != nullptr || args.norms != nullptr || args.workspace.partial != nullptr)
    throw Error("the baselines take no gate, no norms and no workspace");
  launch_kernel(device, stream, kernel,
                {dim3(unsigned(plan.segments), unsigned(args.weights.rows)), plan.warps * kWarpSize},
                make_params(column_form(layout::get(layout::Id::zz4_k)), plan, args));
}

}  // namespace

void launch_skipping_rows(const Device& device, Stream& stream, const SkippingRowsArgs& args) {
  static_assert(sizeof(layout::Q4KBlock) == 144);
  if (args.K % 256 != 0) throw Error("rows of q4_K have a multiple of 256 inputs, not {}", args.K);
  if (args.N == 0) return;
  const dim3 blocks(unsigned((args.N + kRowsOfWarp - 1) / kRowsOfWarp));
  launch_kernel(device, stream, skipping_rows, {blocks, kWarpSize}, args.weights, int(args.N), int(args.K), args.x,
                args.threshold, args.y);
}

void launch_unbalanced(const Device& device, Stream& stream, int segments, const GemvArgs& args) {
  constexpr int kWarps = 8, kChunk = 32, kResident = 24;
  launch_columns(device, stream, gemv<FragZz4K, Inputs::walk, kWarps, kChunk, kResident>,
                 {.warps = kWarps, .chunk = kChunk, .resident = kResident, .segments = segments}, args);
}

void launch_column_parallel(const Device& device, Stream& stream, const GemvArgs& args) {
  constexpr int kWarps = 2, kChunk = 8, kResident = 32;  // two warps: the least that adds up 256 outputs
  const int64_t segments = (args.weights.K + kWarps * kColumnsOfWarp - 1) / (kWarps * kColumnsOfWarp);
  launch_columns(
      device, stream, gemv<FragZz4K, Inputs::list, kWarps, kChunk, kResident>,
      {.warps = kWarps, .chunk = kChunk, .resident = kResident, .segments = int(std::max<int64_t>(1, segments))}, args);
}

}  // namespace lacuna::cuda
