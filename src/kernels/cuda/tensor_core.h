// src/kernels/cuda/tensor_core.h - linear layers of weights in f8, nm24_f8, nm24_bf16 and bf16 on tensor cores, with
// tokens quantized as they come (QuaSpa, sections 3.2 and 3.3). Plain C++.
//
//   y[m, n] = act(x_scale[m] * w_scale[n] * sum_k x[m, k] w[n, k] + bias[n])
//
// Tensor cores take a sparse matrix as the left operand only, so that the weight stands left and the product comes out
// transposed; it is turned on its way to memory. A token's outputs do not depend on the other tokens (but up to
// kMostFewTokens tokens are summed in another order than more), and every run gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "core/thread_pool.h"
#include "kernels/cuda/device.h"
#include "layout/layout.h"

namespace lacuna::cuda {

/// Types of activations on the device.
enum class Element : uint8_t { f32, f16, bf16 };
constexpr int64_t bytes_of(Element element) { return element == Element::f32 ? 4 : 2; }

// ---- quantization of tokens ----

struct QuantizeTokensArgs {
  Element type = Element::bf16;
  const void* x = nullptr;  // [M, K], rows `stride` elements apart
  int64_t stride = 0;
  int64_t M = 0, K = 0;
  std::byte* codes = nullptr;  // e4m3 [M, K], rows code_stride bytes apart, aligned to 16 bytes
  int64_t code_stride = 0;     // a multiple of 16, at least K; bytes from K on are not written
  float* scale = nullptr;      // [M]
};
/// The bytes of kernels::quantize_per_token (kernels/e4m3_tokens.h), but for the sign of a NaN, in one pass over x. M =
/// 0: nothing. Throws Error for strides and addresses that are not as said.
void launch_quantize_tokens(const Device& device, Stream& stream, const QuantizeTokensArgs& args);

// ---- weights ----

/// What a tensor core multiplies: e4m3 or bf16, dense or 2:4.
struct Operation {
  bool eight_bits = true, sparse = false;
  friend bool operator==(const Operation&, const Operation&) = default;
};
/// Throws Error for a layout that is none of f8, nm24_f8, nm24_bf16 and bf16.
Operation operation_of(const layout::Layout& layout);

/// A matrix as both kernels read it: blocks of 64 rows and 128 bytes of inputs (128 of e4m3, 64 of bf16), a row of
/// blocks after the other. In a block
///   values    64 rows of 128 bytes, 2:4: of 64. The 16-byte piece p of row r lies at place p ^ (r % 8), 2:4: at p ^
///             (r / 2 % 4), so that neither ldmatrix nor wgmma meets a bank twice (the swizzle modes of PTX ISA,
///             "Shared Memory Matrix Layout").
///   metadata  of 2:4: e4m3 u32[4][32][2], bf16 u32[4][32]: for 16 rows each, for a lane of a warp each, the words of
///             tensor_core_form.h's order `lanes` for 64 columns each
/// Rows and inputs beyond N and K are zeros.
struct TensorCoreTiles {
  Operation operation;
  layout::Shape shape;
  std::vector<std::byte> blocks;  // tile_bytes(operation, shape)
  std::vector<float> scale;       // e4m3: [N rounded up to 64], 1 past N; bf16: empty
};
inline constexpr int64_t kTileRowsOfWeights = 64, kTileInputBytes = 128;
int64_t block_bytes(Operation operation);
int64_t tile_bytes(Operation operation, layout::Shape shape);
/// bytes: canonical, sound (Layout::first_bad).
TensorCoreTiles make_tensor_core_tiles(const layout::Layout& layout, layout::Shape shape,
                                       std::span<const std::byte> bytes, ThreadPool* pool = nullptr);
/// The inverse: the canonical bytes of f8, nm24_f8, nm24_bf16 or bf16.
std::vector<std::byte> canonical_bytes(const TensorCoreTiles& tiles);

/// A matrix on the device. Several of one operation and K may be joined along N, each from a multiple of 64 rows on.
struct TensorCoreWeights {
  Operation operation;
  int64_t N = 0, K = 0;               // N: of all groups together where there are several
  const std::byte* blocks = nullptr;  // aligned to 128 bytes
  const float* scale = nullptr;       // e4m3: [N rounded up to 64]
};

/// A matrix uploaded.
class TensorCoreMatrix {
 public:
  TensorCoreMatrix() = default;
  /// Throws DoesNotFit naming `what`.
  TensorCoreMatrix(Device& device, const TensorCoreTiles& tiles, std::string_view what);
  const TensorCoreWeights& weights() const { return weights_; }
  int64_t bytes() const { return blocks_.bytes() + scale_.bytes(); }

 private:
  Buffer blocks_, scale_;
  TensorCoreWeights weights_;
};

// ---- the product ----

/// How sums of products of e4m3 are kept.
enum class Accumulate : uint8_t {
  fast,  // in the tensor core's registers, of which Hopper rounds to 14 bits of mantissa (cuBLAS: fast accumulation)
  full,  // of 128 inputs in the tensor core, those added up in float32
};

/// How results reach memory: QuaSpa's ablation (Figure 8).
enum class WriteBack : uint8_t {
  staged,    // through shared memory, then whole lines: "Fused + Smem"
  direct,    // from registers, strided: "Fused"
  separate,  // the transposed product in float32, then a launch that scales, then one that transposes: "Naive"
};

enum class TensorCoreActivation : uint8_t { none, gelu_tanh };

enum class TensorCoreKernel : uint8_t {
  best,   // of those that the device runs
  mma,    // mma.sync and mma.sp.sync: e4m3 from compute capability 8.9 on, bf16 from 8.0 on
  wgmma,  // 9.0
  few,    // up to kMostFewTokens tokens by dense weights, no groups, not WriteBack::separate; sums in float32
};
inline constexpr int64_t kMostFewTokens = 4;

/// A shape of the wgmma kernel.
struct TensorCorePlan {
  int rows = 128;    // of the weight, of a block
  int tokens = 256;  // of a block
  int cluster = 2;   // blocks that share tokens (1: none)
  friend bool operator==(const TensorCorePlan&, const TensorCorePlan&) = default;
};
/// Plans that the kernel has for an operation.
std::span<const TensorCorePlan> tensor_core_plans(Operation operation, Accumulate accumulate);
/// The one taken where none is asked for: of the least rounds of blocks times the time of one.
/// M: tokens of all groups; N: outputs of one; groups 0: one product.
TensorCorePlan default_plan(const DeviceInfo& device, Operation operation, Accumulate accumulate, int64_t M, int64_t N,
                            int groups);

struct TensorCoreArgs {
  TensorCoreWeights w;
  /// e4m3: codes as launch_quantize_tokens writes them; bf16: values. [M, K], rows x_stride bytes apart (a multiple of
  /// 16), aligned to 16 bytes. What lies past K in a row is not read, nor are rows past M.
  const std::byte* x = nullptr;
  int64_t x_stride = 0;
  const float* x_scale = nullptr;  // e4m3: [M]
  int64_t M = 0;

  const float* bias = nullptr;  // [N]
  TensorCoreActivation activation = TensorCoreActivation::none;
  int64_t activation_from = 0;  // of outputs from this one on (a multiple of 64)
  /// y = add + gate * (...): gate [N], add [M, N] as y is and in its type, may be y. Both or none.
  const float* gate = nullptr;
  const void* add = nullptr;
  Element type = Element::bf16;  // of y
  void* y = nullptr;             // [M, N], rows y_stride elements apart
  int64_t y_stride = 0;

  /// Grouped: rows [offsets[g], offsets[g + 1]) of x and y go through group g, outputs [g N / groups, (g + 1) N /
  /// groups) of w, which are a multiple of 64; y's rows, bias and gate then have N / groups values (bias and gate:
  /// those of all groups one after the other). offsets: [groups + 1], in device memory, from 0 to at most M, ascending.
  int groups = 0;
  const int32_t* offsets = nullptr;

  Accumulate accumulate = Accumulate::fast;
  WriteBack write_back = WriteBack::staged;
  TensorCoreKernel kernel = TensorCoreKernel::best;
  /// Of the wgmma kernel's staged write-back; nullptr: default_plan. The others run the first of tensor_core_plans.
  const TensorCorePlan* plan = nullptr;
  float* workspace = nullptr;  // WriteBack::separate: [N, M]
};
/// M = 0 or N = 0: nothing. Neither waits nor allocates. Throws Error for arguments that are not as said, naming what
/// and where, and for a device that no kernel of the operation runs on.
void launch_tensor_core(const Device& device, Stream& stream, const TensorCoreArgs& args);

/// The kernel and the plan that launch_tensor_core takes, in words.
std::string explain_tensor_core(const DeviceInfo& device, const TensorCoreArgs& args);

}  // namespace lacuna::cuda
