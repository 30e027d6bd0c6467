// src/calibrate/two_of_four_descent.h - AWP (arXiv:2506.10205) projected on 2:4: which two of every four weights stay,
// and what they become.
#pragma once

#include <cstdint>
#include <span>

#include "core/thread_pool.h"

namespace lacuna::calibrate {

/// Algorithm 1 with the paper's settings for pruning (section 4.1): from Wanda's answer, Z = Theta + eta (W - Theta) C
/// and Theta = the two largest |z| of every four, eta = 2 / ||C||_F, at most 200 times. The paper prunes rows to any
/// pattern; 2:4 is the extension that it names. A row stops by itself where ||2 (w - theta) C|| / ||w|| < 1e-4, so that
/// answers do not depend on which rows come together. Minimises tr((W - Theta) C (W - Theta)^T).
/// w: [rows, K]; second_moment: C, [K, K], symmetric, diagonal >= 0; keep: [rows, K]; theta: [rows, K], +0 where
/// dropped. All finite. Takes 2 rows K^2 operations a step, and 3 rows K floats of memory beside its arguments.
void descend_two_of_four(std::span<const float> w, std::span<const float> second_moment, std::span<uint8_t> keep,
                         std::span<float> theta, ThreadPool& pool);

}  // namespace lacuna::calibrate
