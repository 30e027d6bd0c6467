// src/kernels/cpu/isa/linear_table.cc - the ordered kernel table of one instruction set.
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {
constexpr int kCapacity = 96;
LinearKernel kernels[kCapacity];
LinearTable table;
}  // namespace

const LinearTable& linear_table() {
  static const bool filled = [] {
    table.kernels = kernels;
    table.quantize = &quantize;
    for (const KernelList& list :
         {panel_kernels(), row_kernels(), float_kernels(), grouped_kernels(), group_panel_kernels(),
          group_sparse_kernels(), group_value_kernels(), decoded_kernels()})
      for (int i = 0; i < list.count; ++i) kernels[table.count++] = list.kernels[i];
    return true;
  }();
  (void)filled;
  return table;
}

}  // namespace lacuna::cpu::LACUNA_ISA
