// src/eval/cuda_spqt.h - SpQt's micro-benchmarks (section 6.3) on a CUDA device: one matrix times one token, dense and
// with inputs left out, beside the baselines.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "eval/spqt.h"
#include "kernels/cuda/device.h"

namespace lacuna::eval {

/// Weights are random and cold: a run is a graph of launches, each on a copy of its own, and its time is divided by
/// their number. Every variant's output is compared with reference_linear, of the first and of the last copy, before
/// and after the clock. Zigzag kernels run with the fastest plan of those tried; lists that a variant reads are made by
/// a kernel before each product, but that of "zz4_k", which collects them itself.
class CudaGemvBench final : public ProductBench {
 public:
  CudaGemvBench(cuda::Device& device, ThreadPool& pool, int runs);
  ~CudaGemvBench() override;
  /// As GemvBench::run. B1 is left out where K is no multiple of 256. Throws Error where memory lacks or a result is
  /// off.
  std::vector<GemvRow> run(const std::string& name, layout::Shape shape,
                           std::span<const GemvVariant> variants) override;

 private:
  cuda::Device& device_;
  ThreadPool& pool_;
  int runs_;
  std::unique_ptr<cuda::Stream> stream_;
};

}  // namespace lacuna::eval
