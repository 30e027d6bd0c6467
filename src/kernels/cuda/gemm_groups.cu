// src/kernels/cuda/gemm_groups.cu - the launches of gemm_groups.cuh.
#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/gemm_groups.cuh"
#include "kernels/cuda/launch.cuh"

namespace lacuna::cuda {
namespace {

using Write = void (*)(GemmGroups);

template <int kBits>
Write write_of(int64_t group) {
  switch (group) {
    case 8:
      return write_groups<kBits, 8>;
    case 16:
      return write_groups<kBits, 16>;
    case 32:
      return write_groups<kBits, 32>;
    case 64:
      return write_groups<kBits, 64>;
    default:
      return write_groups<kBits, 128>;
  }
}

}  // namespace

void launch_gemm_weights(const Device& device, Stream& stream, const layout::Layout& layout, const Groups& weights,
                         int64_t first, const Operand& to) {
  if (!is_group_layout(layout)) throw Error("--device cuda: {} has no groups that are kept whole", layout.name);
  if (to.rows <= 0) return;
  GemmGroups p{};
  p.chunks = weights.chunks, p.start = weights.start + first / kPanelRows;
  p.quads = weights.quads;
  p.rows = int(to.rows), p.K = int(weights.K), p.tiles_of_row = int(tiles_of_row(weights.K));
  p.scale = to.scale, p.tiles = to.tiles;
  p.zero_quads = operand_bytes(to.rows, weights.K) / 16;
  constexpr int kThreads = 512;
  const int64_t blocks = std::min<int64_t>((p.zero_quads + kThreads - 1) / kThreads, device.info().multiprocessors * 4);
  launch_kernel(device, stream, clear_operand, {dim3(unsigned(blocks)), kThreads}, p);
  const int64_t panels = (to.rows + kPanelRows - 1) / kPanelRows;
  const Write kernels[] = {write_of<2>(weights.group), write_of<4>(weights.group), write_of<8>(weights.group),
                           write_of<16>(weights.group)};
  const int width = GroupForm(layout.bits, int(weights.group)).width;
  const Write of_units = width == 2 ? write_units<2> : write_units<4>;
  const Write kernel = weights.are_units() ? of_units : kernels[width == 2 ? 0 : width == 4 ? 1 : width == 8 ? 2 : 3];
  const int64_t each = std::max<int64_t>(1, device.info().multiprocessors * 4 / panels);
  launch_kernel(device, stream, kernel, {dim3(unsigned(each), unsigned(panels)), kGemmGroupWarps * 32}, p);
}

}  // namespace lacuna::cuda
