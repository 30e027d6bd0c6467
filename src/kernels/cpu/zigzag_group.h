// src/kernels/cpu/zigzag_group.h - a LinearGroup of zigzag weights on the CPU.
#pragma once

#include <memory>
#include <span>

#include "kernels/cpu/zigzag_kernel.h"
#include "kernels/linear.h"

namespace lacuna::cpu {

/// Tokens up to which codes are multiplied as they are. More go through panels, whose making costs as much as about
/// this many tokens.
inline constexpr int64_t kZigzagFewTokens = 16;

/// Parts: zigzag layouts only, one K. Prepare::automatic lays the columns of all parts together in huge pages;
/// in_place reads the parts' own bytes, whatever plan.tile_rows says. Throws Error as make_cpu_linear_group does.
std::unique_ptr<kernels::LinearGroup> make_zigzag_group(Isa isa, std::span<const kernels::WeightView> parts,
                                                        ThreadPool& pool, kernels::Prepare prepare,
                                                        const kernels::Plan& plan = kernels::default_plan());

}  // namespace lacuna::cpu
