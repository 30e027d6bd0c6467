// src/kernels/cuda/beams.h - what beam search takes beside a decoder's ops (ops.h): which keys and values are whose,
// and what makes logits probabilities. Plain C++.
//
// All pointers are of device memory. Launches neither wait nor allocate.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"

namespace lacuna::cuda {

/// A step of beams, what the host decides of it: one copy.
struct BeamStep {
  int32_t ids[kMostBeams] = {};  // the tokens
  int32_t first = 0;             // BeamCache::first
  int32_t position = 0;          // of the tokens
  uint32_t parents = 0;          // four bits a beam: the beam that it goes on from
};
/// sources [capacity] (BeamCache) of the new beams from those of their parents; each beam's own slot at the position.
void launch_order_beams(const Device& device, Stream& stream, const BeamStep* step, uint32_t* sources,
                        int64_t capacity);

struct LogSumExpArgs {
  const float* x = nullptr;        // [M, N]
  int64_t M = 1, N = 0;            // N at most 2^24
  double* out = nullptr;           // [M]: not finite with a NaN or +infinity, or where all are -infinity
  std::byte* workspace = nullptr;  // log_sum_exp_workspace_bytes(M, N), zeros before the first launch
};
int64_t log_sum_exp_workspace_bytes(int64_t M, int64_t N);
/// log sum_n e^x[n] of each row; the same bits every time. Off by at most 2^-18: exponentials and their
/// first sums are float's.
void launch_log_sum_exp(const Device& device, Stream& stream, const LogSumExpArgs& args);

}  // namespace lacuna::cuda
