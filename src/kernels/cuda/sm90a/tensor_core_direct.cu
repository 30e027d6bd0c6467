// src/kernels/cuda/sm90a/tensor_core_direct.cu - the wgmma kernel with results strided from registers, and with sums
// alone: one shape of each operation, the largest.
#include "kernels/cuda/sm90a/tensor_core_wgmma.cuh"

namespace lacuna::cuda {
namespace {

template <bool kEightBits, bool kSparse, bool kFull>
void run(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  launch<Shape<kEightBits, kSparse, kFull, kFull ? 128 : 256, 2, false>>(device, stream, args);
}

}  // namespace

void launch_wgmma_direct(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  const bool sparse = args.w.operation.sparse;
  if (!args.w.operation.eight_bits)
    sparse ? run<false, true, false>(device, stream, args) : run<false, false, false>(device, stream, args);
  else if (args.accumulate == Accumulate::full)
    sparse ? run<true, true, true>(device, stream, args) : run<true, false, true>(device, stream, args);
  else
    sparse ? run<true, true, false>(device, stream, args) : run<true, false, false>(device, stream, args);
}

}  // namespace lacuna::cuda
