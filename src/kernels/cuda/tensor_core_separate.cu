// src/kernels/cuda/tensor_core_separate.cu - WriteBack::separate: what the product kernels do on the way to memory, as
// launches of their own over the transposed product [outputs, M] ("Naive" of QuaSpa's Figure 8).
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core_mma.h"
#include "kernels/cuda/tensor_core_store.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256, kScaledOutputs = 32, kTile = 64;

__global__ void __launch_bounds__(kThreads) scale_product(const __grid_constant__ TensorCoreArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x, outputs = outputs_of_group(a);
  TokenRange tokens;
  const int group = token < a.M ? group_of(a, token, tokens) : -1;
  if (group < 0) return;
  const float x_scale = __ldcg(a.x_scale + token);
  const int64_t first = int64_t{blockIdx.y} * kScaledOutputs;
#pragma unroll 8
  for (int64_t n = first; n < min(first + kScaledOutputs, outputs); ++n) {
    float& sum = a.workspace[n * a.M + token];
    sum = sum * x_scale * a.w.scale[group * outputs + n];
  }
}

__global__ void __launch_bounds__(kThreads) transpose_product(const __grid_constant__ TensorCoreArgs a) {
  constexpr int kAtOnce = kThreads / kTile;
  __shared__ float tile[kTile][kTile + 1];  // [output][token]
  launch_dependents();
  wait_for_predecessors();
  const int64_t first_token = int64_t{blockIdx.x} * kTile, first_output = int64_t{blockIdx.y} * kTile;
  const int64_t outputs = outputs_of_group(a);
  const int column = int(threadIdx.x) % kTile, row0 = int(threadIdx.x) / kTile;
  for (int row = row0; row < kTile; row += kAtOnce)
    if (first_output + row < outputs && first_token + column < a.M)
      tile[row][column] = __ldcg(a.workspace + (first_output + row) * a.M + first_token + column);
  __syncthreads();

  const int64_t output = first_output + column;
  if (output >= outputs) return;
  TokenRange tokens{0, 0};
  OutputTerms terms(a, output, output);
  for (int row = row0; row < kTile; row += kAtOnce) {
    const int64_t token = first_token + row;
    if (token >= a.M) return;
    if (token >= tokens.end) {
      const int group = group_of(a, token, tokens);
      if (group < 0) return;  // nor are those after it
      terms = OutputTerms(a, group * outputs + output, output);
      terms.scale = 1;
    }
    store_result(a, token * a.y_stride + output, terms.finish(tile[column][row], 1));
  }
}

dim3 grid(const TensorCoreArgs& args, int64_t tokens, int64_t outputs) {
  const int64_t of_group = args.groups > 0 ? args.w.N / args.groups : args.w.N;
  return dim3(unsigned((args.M + tokens - 1) / tokens), unsigned((of_group + outputs - 1) / outputs));
}

}  // namespace

void launch_scale_product(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  launch_kernel(device, stream, scale_product, {grid(args, kThreads, kScaledOutputs), kThreads}, args);
}

void launch_transpose_product(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  launch_kernel(device, stream, transpose_product, {grid(args, kTile, kTile), kThreads}, args);
}

}  // namespace lacuna::cuda
