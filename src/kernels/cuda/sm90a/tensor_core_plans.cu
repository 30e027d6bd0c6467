// src/kernels/cuda/sm90a/tensor_core_plans.cu - the shapes of the wgmma kernel, and the launch of one.
#include <array>

#include "core/error.h"
#include "kernels/cuda/sm90a/tensor_core_rows.h"
#include "kernels/cuda/tensor_core_wgmma.h"

namespace lacuna::cuda {
namespace {

std::span<const WgmmaRow> rows(Operation operation, Accumulate accumulate) {
  if (!operation.eight_bits) return operation.sparse ? wgmma_rows_nm24_bf16() : wgmma_rows_bf16();
  if (accumulate == Accumulate::full) return operation.sparse ? wgmma_rows_nm24_f8_full() : wgmma_rows_f8_full();
  return operation.sparse ? wgmma_rows_nm24_f8() : wgmma_rows_f8();
}

int index(Operation operation, Accumulate accumulate) {
  return int(operation.eight_bits) + 2 * int(operation.sparse) + 4 * int(accumulate == Accumulate::full);
}

}  // namespace

std::span<const TensorCorePlan> tensor_core_plans(Operation operation, Accumulate accumulate) {
  static const auto plans = [] {
    std::array<std::vector<TensorCorePlan>, 8> out;
    for (const bool eight_bits : {false, true})
      for (const bool sparse : {false, true})
        for (const Accumulate sums : {Accumulate::fast, Accumulate::full})
          for (const WgmmaRow& row : rows({eight_bits, sparse}, sums))
            out[size_t(index({eight_bits, sparse}, sums))].push_back(row.plan);
    return out;
  }();
  return plans[size_t(index(operation, accumulate))];
}

void launch_tensor_core_wgmma(const Device& device, Stream& stream, const TensorCoreArgs& args,
                              const TensorCorePlan& plan) {
  if (args.write_back != WriteBack::staged || args.type == Element::f32)
    return launch_wgmma_direct(device, stream, args);
  for (const WgmmaRow& row : rows(args.w.operation, args.accumulate))
    if (row.plan == plan) return row.run(device, stream, args);
  throw Error("the wgmma kernel has no plan of {} outputs by {} tokens in clusters of {}", plan.rows, plan.tokens,
              plan.cluster);
}

}  // namespace lacuna::cuda
