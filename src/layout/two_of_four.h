// src/layout/two_of_four.h - 2:4 masks: of every four consecutive inputs two are kept; of a last group of one or two
// inputs all, of three two.
#pragma once

#include <cstdint>
#include <span>

namespace lacuna::layout {

/// Weights that a group of four has to keep: 2, or all of a last group of one or two.
constexpr int64_t kept_of_four(int64_t K, int64_t group) { return K - 4 * group < 2 ? K - 4 * group : 2; }

/// Marks those of the largest score, of equal ones the first. score: [K], no NaN; keep: [K].
void keep_largest(std::span<const float> score, std::span<uint8_t> keep);

/// Marks the weights of a row that was pruned before: those that are not 0, then -0, then the first of the others. w,
/// keep: [K]. Throws Error naming the group of four that has three or four which are not 0.
void keep_nonzero(std::span<const float> w, std::span<uint8_t> keep);

/// Index of the first group of four that does not keep what it has to, or -1. keep: [K].
int64_t find_bad_group(std::span<const uint8_t> keep);

}  // namespace lacuna::layout
