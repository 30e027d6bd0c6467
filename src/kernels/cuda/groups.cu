// src/kernels/cuda/groups.cu - choice and launch of the kernels over group-sparse weights.
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/groups.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/units.cuh"

namespace lacuna::cuda {
namespace {

std::span<const GroupsKernel> kernels_of(int width) {
  switch (width) {
    case 2:
      return groups_kernels_2();
    case 4:
      return groups_kernels_4();
    case 8:
      return groups_kernels_8();
    default:
      return groups_kernels_16();
  }
}

template <bool kInt8>
__global__ void __launch_bounds__(128) make_places(const __grid_constant__ GemvInputs inputs, uint4* to) {
  const int places = (inputs.K + kUnit - 1) / kUnit;
  StagedPlaces out(to, places + 1);
  launch_dependents();
  wait_for_predecessors();
  out.stage<kInt8>(inputs, places, int(blockIdx.x * blockDim.x + threadIdx.x), int(gridDim.x * blockDim.x));
}

void launch_units(const Device& device, Stream& stream, const layout::Layout& layout, const GroupsPlan& plan,
                  const GroupsArgs& args) {
  const Groups& w = args.weights;
  const int width = UnitForm(layout.bits).width;
  const auto kernels = width == 2 ? units_kernels_2() : units_kernels_4();
  const bool ordered = args.workspace.partial != nullptr;
  const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const UnitsKernel& k) {
    return k.ordered == ordered && plan.math == Math::dot && k.inputs == args.input_bits && k.warps == plan.warps &&
           k.resident == plan.resident;
  });
  if (kernel == kernels.end())
    throw Error("no CUDA kernel of units of {} for the plan: {}", layout.name, describe(plan));
  if (plan.blocks < 1) throw Error("{} blocks", plan.blocks);
  UnitsParams p{};
  p.inputs = {args.x, args.up, args.norms, args.threshold, int(w.K)};
  p.ready = reinterpret_cast<const uint4*>(args.ready);
  p.records = w.chunks, p.quads = w.quads, p.quad_of = w.quad_of;
  p.record_count = uint32_t(w.count), p.quad_count = uint32_t(w.quad_count);
  const auto warps = uint32_t(plan.blocks * plan.warps);
  p.of_warp = p.record_count / warps, p.larger = p.record_count % warps;
  p.slices = plan.split == Split::slice;
  p.y = args.y, p.zero = args.zero, p.zero_quads = unsigned(args.zero_count / 4);
  p.next = args.next;
  p.start = args.workspace.start;
  const int64_t shared = (((w.K + kUnit - 1) / kUnit + 1) * StagedPlaces::kBytes + 15) / 16 * 16;
  if (shared > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch_kernel(device, stream, kernel->kernel, {dim3(unsigned(plan.blocks)), plan.warps * 32, shared}, p);
}

}  // namespace

void launch_group_inputs(const Device& device, Stream& stream, const GroupsArgs& args, std::byte* to) {
  const Groups& w = args.weights;
  if (!w.are_units()) throw Error("inputs are made ready for weights in units; these are chunks, which make their own");
  const GemvInputs inputs = {args.x, args.up, args.norms, args.threshold, int(w.K)};
  const dim3 blocks(unsigned(((w.K + 7) / 8 + 127) / 128));
  const auto kernel = args.input_bits == InputBits::int8 ? make_places<true> : make_places<false>;
  launch_kernel(device, stream, kernel, {blocks, 128}, inputs, reinterpret_cast<uint4*>(to));
}

void launch_groups(const Device& device, Stream& stream, const layout::Layout& layout, const GroupsPlan& plan,
                   const GroupsArgs& args) {
  if (!is_group_layout(layout)) throw Error("--device cuda: {} has no groups that are kept whole", layout.name);
  const Groups& w = args.weights;
  if (w.panels <= 0) return;
  if (w.are_units()) return launch_units(device, stream, layout, plan, args);
  const GroupForm form(layout.bits, int(w.group));
  const auto kernels = kernels_of(form.width);
  const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const GroupsKernel& k) {
    return k.group == form.group && k.plan.math == plan.math && k.plan.warps == plan.warps &&
           k.plan.resident == plan.resident;
  });
  if (kernel == kernels.end())
    throw Error("no CUDA kernel of {} with groups of {} for the plan: {}", layout.name, w.group, describe(plan));
  const bool stream_k = plan.split == Split::stream;
  if (plan.blocks < 1 || (stream_k ? plan.blocks > w.count : plan.blocks % w.panels != 0))
    throw Error(
        "{} blocks for {} chunks of {} panels: stream-K has at most as many blocks as chunks, slice-K the same "
        "number for every panel",
        plan.blocks, w.count, w.panels);
  GroupsParams p{};
  p.chunks = w.chunks, p.start = w.start, p.bound = w.bound;
  p.inputs = {args.x, args.up, args.norms, args.threshold, int(w.K)};
  p.y = args.y, p.zero = args.zero, p.zero_quads = unsigned(args.zero_count / 4);
  p.workspace = args.workspace;
  p.next = args.next;
  if (stream_k)
    p.of_block = uint32_t(w.count / plan.blocks), p.larger = uint32_t(w.count % plan.blocks);
  else
    p.slices = uint32_t(plan.blocks / w.panels);
  p.panels = int(w.panels);
  p.int8 = args.input_bits == InputBits::int8;
  const int64_t places = (w.K + w.group - 1) / w.group, shared = places * (w.group * 2 + int64_t(sizeof(float2)));
  if (shared > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch_kernel(device, stream, kernel->kernel, {dim3(unsigned(plan.blocks)), plan.warps * 32, shared}, p);
}

}  // namespace lacuna::cuda
