// python/src/module.cc - lacuna._core: layouts, products and policies for the Python package. Functions take tensors
// through DLPack, write into those that the caller made, and let other Python threads run meanwhile.
#include <unistd.h>

#include <memory>
#include <mutex>

#include "bind.h"
#include "core/error.h"
#include "layout/tensor_core.h"

namespace lacuna::python {

namespace {

constexpr int64_t kFewOperations = 1 << 20;  // some hundred microseconds of one core

struct Threads {
  std::mutex mutex;
  int wanted = usable_cores();
  pid_t process = 0;
  std::unique_ptr<ThreadPool> pool;
};
Threads& threads() {
  static Threads* const out = new Threads;  // never destroyed: a thread may outlive the module
  return *out;
}

}  // namespace

const layout::Layout& packed_layout(const std::string& name) {
  const layout::Layout* found = layout::find(name);
  if (found == nullptr || found->family != layout::Family::tensor_core)
    throw Error("unknown layout \"{}\"; linear layers have f8, nm24_f8, nm24_bf16", name);
  return *found;
}

int64_t row_bytes(const layout::Layout& layout, int64_t K) {
  if (K < 0) throw Error("K = {}, but a row has no less than 0 weights", K);
  return layout::tensor_core_row(layout, K).bytes;
}

void with_threads(int64_t operations, const std::function<void(ThreadPool&)>& work) {
  if (operations < kFewOperations) {
    ThreadPool alone(1);
    return work(alone);
  }
  Threads& all = threads();
  const std::lock_guard lock(all.mutex);
  if (all.pool != nullptr && all.process != getpid()) (void)all.pool.release();  // its threads are the parent's
  if (all.pool == nullptr || all.pool->size() != all.wanted) {
    all.pool.reset();
    all.pool = std::make_unique<ThreadPool>(all.wanted);
    all.process = getpid();
  }
  work(*all.pool);
}

void set_threads(int count) {
  if (count < 1) throw Error("{} threads, but it takes at least 1", count);
  Threads& all = threads();
  const std::lock_guard lock(all.mutex);
  all.wanted = count;
}

}  // namespace lacuna::python

NB_MODULE(_core, m) {
  namespace nb = nanobind;
  m.doc() = "Layouts, products and policies of lacuna. Tensors come through DLPack; outputs are the caller's.";
  nb::exception<lacuna::Error>(m, "Error", PyExc_ValueError).doc() =
      "What was wrong, where, and what to do, in one sentence.";
  m.def("set_threads", &lacuna::python::set_threads, nb::arg("count"),
        "Threads of products on the CPU from now on; at first one per core that the process may use.");
  lacuna::python::bind_weights(m);
  lacuna::python::bind_products(m);
  lacuna::python::bind_policy(m);
  lacuna::python::bind_cuda(m);
}
