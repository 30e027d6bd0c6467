// src/layout/fallback.h - what to store a matrix as when its row length does not fit the layout asked for.
#pragma once

#include <cstdint>

#include "layout/layout.h"

namespace lacuna::layout {

/// `wanted` where it can hold rows of K weights, else the substitute that llama.cpp takes: q2_K, q3_K -> q4_0;
/// q4_K -> q5_0; q5_K -> q5_1; q6_K -> q8_0; and f16 where K is no multiple of 32 either.
Id fitting_layout(Id wanted, int64_t K);

}  // namespace lacuna::layout
