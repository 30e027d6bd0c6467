// src/kernels/cpu/zigzag_group.h - a LinearGroup of zigzag weights on the CPU.
#pragma once

#include <memory>
#include <span>

#include "kernels/cpu/zigzag_kernel.h"
#include "kernels/linear.h"

namespace lacuna::cpu {

/// How one token's columns are shared out; `tune` measures it. Every choice gives a correct result.
struct ZigzagPlan {
  /// Pieces that the list of columns is cut into, each with sums of its own; 0: one for each worker. A fixed number
  /// makes results independent of the number of workers.
  int pieces = 0;
};

/// Parts: zigzag layouts only, one K. Prepare::automatic lays the columns of all parts together in huge pages;
/// in_place reads the parts' own bytes. Throws Error as make_cpu_linear_group does.
std::unique_ptr<kernels::LinearGroup> make_zigzag_group(Isa isa, std::span<const kernels::WeightView> parts,
                                                        ThreadPool& pool, kernels::Prepare prepare,
                                                        const ZigzagPlan& plan = {});

}  // namespace lacuna::cpu
