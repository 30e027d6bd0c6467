// python/src/bind.h - the parts of the extension lacuna._core.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>

#include "core/thread_pool.h"
#include "layout/layout.h"

namespace lacuna::python {

void bind_weights(nanobind::module_& m);
void bind_products(nanobind::module_& m);
void bind_policy(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);

/// f8, nm24_f8 or nm24_bf16. Throws Error naming these for another one.
const layout::Layout& packed_layout(const std::string& name);
/// Bytes of a row of K weights.
int64_t row_bytes(const layout::Layout& layout, int64_t K);

/// Runs work with the module's threads, one caller after the other; of few operations on the caller's alone, since
/// torch's threads still hold the cores for a while after its own work. A forked child makes threads of its own.
void with_threads(int64_t operations, const std::function<void(ThreadPool&)>& work);
/// Throws Error for less than one.
void set_threads(int count);

}  // namespace lacuna::python
