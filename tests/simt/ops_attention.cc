#pragma GCC diagnostic ignored "-Wshadow"  // nvcc has no such warning
#include "kernels/cuda/ops_attention.cu"

namespace lacuna::cuda {

/// Of the lists that follow one text's attention, which no test here asks for.
void launch_gate(const Device&, Stream&, const GateArgs&) { throw Error("no lists are made thread by thread"); }

}  // namespace lacuna::cuda
