// src/kernels/cuda/active.h - the list of active inputs as a kernel of its own (CUB's block scan): what the GEMV that
// collects by itself is compared with, and what serves several readers.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace lacuna::cuda {

/// Writes the indices k, ascending, for which not |x[k]| < t (|x[k]| * norms[k] < t where norms is no nullptr) to list
/// ([K]) and their number to count. The same list every time. Device memory. One block: K is a layer's width.
void collect_active(const Device& device, Stream& stream, const float* x, int64_t K, const float* norms, float t,
                    int32_t* list, int32_t* count);

}  // namespace lacuna::cuda
