// src/kernels/cpu/isa/linear_table.h - the parts of one instruction set's kernel table.
#pragma once

#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu::LACUNA_ISA {

void quantize(const QuantizeArgs& args);

/// Kernels of one family, appended to the table in order of preference.
struct KernelList {
  const LinearKernel* kernels;
  int count;
};
KernelList panel_kernels();         // block layouts, repacked
KernelList row_kernels();           // block layouts, canonical bytes
KernelList float_kernels();         // f32, f16, bf16, canonical bytes
KernelList grouped_kernels();       // gq, bm, nm24_q4, repacked
KernelList group_panel_kernels();   // gs2, gs3, gs4, gs8, repacked, where the instruction set has what it takes
KernelList group_sparse_kernels();  // gs2, gs3, gs4, gs8, repacked
KernelList group_value_kernels();   // gs16, canonical bytes
KernelList decoded_kernels();       // those layouts, whatever their shape and parameters, decoded row by row

}  // namespace lacuna::cpu::LACUNA_ISA
