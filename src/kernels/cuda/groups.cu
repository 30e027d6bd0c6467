// src/kernels/cuda/groups.cu - choice and launch of the kernels over group-sparse weights.
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/groups.cuh"
#include "kernels/cuda/launch.cuh"

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

/// Places of inputs that a block has room for: what an even share of the chunks needs with some to spare, within what
/// leaves shared memory for two blocks. A block that needs more takes several passes.
int64_t staged_places(const Groups& w, const GroupsPlan& plan) {
  const int64_t all = (w.K + w.group - 1) / w.group, share = all * w.panels / plan.blocks;
  return std::min(all, std::clamp(share + share / 4 + 2, kChunkInputs / w.group, 2 * kChunkInputs / w.group));
}

}  // namespace

void launch_groups(const Device& device, Stream& stream, const layout::Layout& layout, const GroupsPlan& plan,
                   const GroupsArgs& args) {
  if (!is_group_layout(layout)) throw Error("--device cuda: {} has no groups that are kept whole", layout.name);
  const Groups& w = args.weights;
  if (w.panels <= 0) return;
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
  p.x = args.x, p.up = args.up, p.norms = args.norms, p.threshold = args.threshold;
  p.y = args.y, p.zero = args.zero, p.zero_quads = unsigned(args.zero_count / 4);
  p.workspace = args.workspace;
  if (stream_k)
    p.of_block = uint32_t(w.count / plan.blocks), p.larger = uint32_t(w.count % plan.blocks);
  else
    p.slices = uint32_t(plan.blocks / w.panels);
  p.K = int(w.K), p.panels = int(w.panels);
  p.int8 = args.input_bits == InputBits::int8;
  p.room = int(staged_places(w, plan));
  const int64_t shared = kernel->ring_bytes + p.room * (w.group * 2 + int64_t(sizeof(float2)));
  if (shared > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch_kernel(device, stream, kernel->kernel, {dim3(unsigned(plan.blocks)), plan.warps * 32, shared}, p);
}

}  // namespace lacuna::cuda
