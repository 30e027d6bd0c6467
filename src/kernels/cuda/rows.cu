#include <limits>

#include "core/error.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/rows.h"

namespace lacuna::cuda {
namespace {

const RowsKernel& kernel_of(const layout::Layout& layout) {
  for (const auto find : {float_rows_kernel, block_rows_kernel, superblock_rows_kernel, grouped_rows_kernel})
    if (const RowsKernel* kernel = find(layout.id)) return *kernel;
  throw Error("--device cuda: no row kernel reads {}", layout.name);
}

RowsParams params_of(const Rows& rows) {
  const layout::Layout& layout = *rows.layout;
  const int64_t K = rows.K;
  const RowPlaces places = row_places(layout, K, rows.params);
  if (places.row_bytes > std::numeric_limits<int32_t>::max())
    throw Error("--device cuda: K = {} of {} is too wide; a row may have 2 GiB", K, layout.name);
  RowsParams p{};
  p.K = uint32_t(K);
  p.row_bytes = places.row_bytes;
  p.group_factor = places.group_factor;
  for (int i = 0; i < kMostPlanes; ++i) p.plane[i] = uint32_t(places.plane[i]);
  return p;
}

}  // namespace

void launch_rows(const Device& device, Stream& stream, const RowsArgs& args) {
  if (args.M <= 0) return;
  if (args.M > kMostFewRows)
    throw Error("--device cuda: {} tokens; the row kernels take at most {}", args.M, kMostFewRows);
  for (size_t first = 0; first < args.parts.size();) {
    const Rows& rows = args.parts[first].weights;
    RowsParams p = params_of(rows);
    p.x = args.x;
    p.norms = args.norms;
    p.threshold = args.threshold;
    p.tokens = int(args.M);
    if (args.M > 1) p.x_stride = args.x_stride, p.y_stride = args.y_stride;
    int64_t total = 0;
    for (; first < args.parts.size() && p.parts < kMostParts; ++first) {
      const RowsPart& part = args.parts[first];
      if (part.weights.layout != rows.layout || part.weights.params.group_size != rows.params.group_size) break;
      p.part[p.parts++] = {part.weights.data, part.bias, part.y, int(total)};
      total += part.weights.N;
    }
    if (total > std::numeric_limits<int32_t>::max() - 64)
      throw Error("--device cuda: {} outputs are too many for one launch", total);
    p.rows = int(total);
    if (p.rows > 0) kernel_of(*rows.layout).multiply(device, stream, p);
  }
}

void launch_embed(const Device& device, Stream& stream, const Rows& rows, const int32_t* ids, int64_t M, float* out) {
  if (M <= 0) return;
  RowsParams p = params_of(rows);
  p.part[0].data = rows.data;
  p.parts = 1;
  p.rows = int(rows.N);
  kernel_of(*rows.layout).embed(device, stream, p, ids, M, out);
}

}  // namespace lacuna::cuda
