// src/kernels/linear.h - contract of the linear op: y[M,N] = x[M,K] W[N,K]^T (+ bias), for a group of weights that read
// one input.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/plan.h"
#include "layout/layout.h"

namespace lacuna::kernels {

/// One weight matrix in canonical bytes, as the file holds it. The bytes must outlive every kernel that reads them in
/// place.
struct WeightView {
  std::string name;  // for messages
  const layout::Layout* layout = nullptr;
  layout::Shape shape;
  std::span<const std::byte> bytes;
  std::span<const float> bias = {};  // [N] or empty
  layout::Params params = {};        // of the layout: tile_rows of a zigzag one
};

/// The input of a group.
struct Activation {
  const float* x = nullptr;  // [M, K], rows `stride` floats apart
  int64_t M = 0;
  int64_t stride = 0;
  /// The inputs that count, ascending, each in [0, K); the others are taken as zeros whatever x holds. With several
  /// tokens it is one list for all of them. active_count < 0: all inputs count.
  const int32_t* active = nullptr;
  int64_t active_count = -1;
  bool all() const { return active_count < 0; }
};

/// Where one part's result goes: y: [M, N], rows `stride` floats apart. Each part of a group has one.
struct Output {
  float* y = nullptr;
  int64_t stride = 0;
};

enum class Prepare : uint8_t {
  automatic,  // repack where it is faster here
  in_place,   // read the canonical bytes from the mapped file; no second copy
};

/// Weights that read one input (q, k, v; gate, up), prepared for one backend and called together, so that the input is
/// quantized once and the threads join once. Parts may differ in layout and N, not in K.
class LinearGroup {
 public:
  virtual ~LinearGroup() = default;
  /// Computes every part. Any M >= 0. No allocation once scratch has grown to the largest M seen (grows by reserve()).
  virtual void run(const Activation& x, std::span<const Output> y) = 0;
  /// Makes room for M rows, so that run() does not allocate up to that M.
  virtual void reserve(int64_t M) = 0;
  /// Bytes that one run with M = 1 reads.
  virtual int64_t weight_bytes() const = 0;
  /// Bytes of prepared copies (0 when everything is read in place).
  virtual int64_t prepared_bytes() const = 0;
  /// From now on zigzag weights are multiplied as this plan says; other weights ignore it. Throws Error when prepared
  /// weights lie in other tiles than the plan's.
  virtual void set_plan(const Plan&) {}
  /// One line a part: name, shape, layout, the kernels chosen for M = 1 and for large M.
  virtual std::string explain() const = 0;
};

/// Checks the weights of a group: sizes, biases, params, one K, which it returns. Throws Error naming the weight.
int64_t check_weights(std::span<const WeightView> parts);

/// Prepares a group for the CPU. Throws Error naming layout, shape and device where no kernel can run. Uses the pool to
/// repack. plan: of the zigzag parts; the others ignore it.
std::unique_ptr<LinearGroup> make_cpu_linear_group(std::span<const WeightView> parts, ThreadPool& pool,
                                                   Prepare prepare = Prepare::automatic,
                                                   const Plan& plan = default_plan());

/// The same in double precision from layout::decode_rows, one thread, any layout: what the kernels are tested against.
void reference_linear(const WeightView& w, const Activation& x, const Output& y);

}  // namespace lacuna::kernels
