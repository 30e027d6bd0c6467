// src/kernels/cuda/sm90a/tensor_core_rows.h - the shapes that the wgmma kernel of tensor_core.h is compiled for, by
// operation: each in a file of its own.
#pragma once

#include <span>

#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

struct WgmmaRow {
  TensorCorePlan plan;
  void (*run)(const Device&, Stream&, const TensorCoreArgs&);
};

std::span<const WgmmaRow> wgmma_rows_f8();
std::span<const WgmmaRow> wgmma_rows_f8_full();
std::span<const WgmmaRow> wgmma_rows_nm24_f8();
std::span<const WgmmaRow> wgmma_rows_nm24_f8_full();
std::span<const WgmmaRow> wgmma_rows_bf16();
std::span<const WgmmaRow> wgmma_rows_nm24_bf16();

/// Results strided from registers, or sums alone: of any operation, in one shape each.
void launch_wgmma_direct(const Device& device, Stream& stream, const TensorCoreArgs& args);

}  // namespace lacuna::cuda
