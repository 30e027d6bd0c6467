// src/kernels/cuda/image_ops.h - what lies between the linear layers of a diffusion transformer: norms with shift and
// scale, heads, attention of all tokens, routing of experts. Activations are bf16, arithmetic is float32. Plain C++.
//
// No launch waits or allocates; every run gives the same bits. Each throws Error for arguments that are not as said.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/scalar.h"
#include "kernels/cuda/device.h"

namespace lacuna::cuda {

/// Rows of several images: the text tokens of all, image after image, then the image tokens of all.
struct TokenRows {
  int64_t images = 1, text = 0, image = 0;  // tokens of one
  int64_t tokens() const { return text + image; }
  int64_t count() const { return images * tokens(); }
};

/// y = (x - mean) / sqrt(variance + eps) * (1 + scale) + shift, rounded to bf16, of rows [first, first + M) of `rows`.
/// codes: those values quantized as launch_quantize_tokens quantizes them, in the same pass. y, codes or both.
struct ModulatedNormArgs {
  TokenRows rows;
  int64_t first = 0, M = 0, width = 0;  // width: at most 32768
  const bf16* x = nullptr;              // row `first`; rows x_stride apart, as those of y a multiple of 8 values
  int64_t x_stride = 0;
  const float* shift = nullptr;  // [images][modulation_stride]
  const float* scale = nullptr;
  int64_t modulation_stride = 0;
  float eps = 1e-6f;
  bf16* y = nullptr;
  int64_t y_stride = 0;
  std::byte* codes = nullptr;  // rows code_stride bytes apart, a multiple of 16
  int64_t code_stride = 0;
  float* code_scale = nullptr;  // [M]
};
void launch_modulated_norm(const Device& device, Stream& stream, const ModulatedNormArgs& args);

/// x += gate * y of rows [first, first + M).
struct GatedAddArgs {
  TokenRows rows;
  int64_t first = 0, M = 0, width = 0;
  const bf16* y = nullptr;  // row `first`; rows aligned to 16 bytes, as those of x
  int64_t y_stride = 0;
  const float* gate = nullptr;  // [images][gate_stride]
  int64_t gate_stride = 0;
  bf16* x = nullptr;
  int64_t x_stride = 0;
};
void launch_gated_add(const Device& device, Stream& stream, const GatedAddArgs& args);

/// Root mean square norm of each head's query and key, then the rotary embedding of neighbours (2 i, 2 i + 1). Results
/// may be where the inputs are. Elements of a head from head_dim to padded_dim are written as zeros.
struct ImageHeadsArgs {
  TokenRows rows;
  int64_t first = 0, M = 0, n_heads = 0;
  int64_t head_dim = 0, padded_dim = 0;  // even, at most 128
  const bf16* q = nullptr;               // row `first`: [n_heads][head_dim], rows in_stride apart
  const bf16* k = nullptr;
  const bf16* v = nullptr;  // nullptr: values stay where they are
  int64_t in_stride = 0;
  const float* q_norm = nullptr;  // [head_dim]
  const float* k_norm = nullptr;
  float eps = 1e-6f;
  const float* cos = nullptr;  // [text + image][head_dim / 2]
  const float* sin = nullptr;
  bf16* q_out = nullptr;  // row `first`: [n_heads][padded_dim], rows out_stride apart
  bf16* k_out = nullptr;
  bf16* v_out = nullptr;
  int64_t out_stride = 0;
};
void launch_image_heads(const Device& device, Stream& stream, const ImageHeadsArgs& args);

enum class JointAttentionKernel : uint8_t {
  best,   // wgmma where it runs, else mma
  mma,    // mma.sync
  wgmma,  // compute capability 9.0; heads of more than 64 values, out_dim and out_stride multiples of 8, `out` aligned
          // to 16 bytes, images of at most kMostWgmmaTokens tokens
};
inline constexpr int64_t kMostWgmmaTokens = int64_t{1} << 21;

/// Softmax attention of all tokens of an image over all of them. Error of a weight, in both kernels: a rounding to bf16
/// (2^-8 of itself) and what its score's float32 error makes of it; sums are float32, in an order of each kernel's own.
/// `out` may be `q` where out_dim is head_dim: a block reads its queries before it writes.
struct JointAttentionArgs {
  TokenRows rows;
  int64_t n_heads = 0;
  int64_t head_dim = 0;                                 // of q, k and v: a multiple of 8, at most 128
  const bf16 *q = nullptr, *k = nullptr, *v = nullptr;  // row 0: [n_heads][head_dim], aligned to 16 bytes
  int64_t stride = 0;                                   // of q and k, as v_stride a multiple of 8
  int64_t v_stride = 0;
  float scale = 0;
  bf16* out = nullptr;  // row 0: [n_heads][out_dim]
  int64_t out_dim = 0;  // even, at most head_dim: the rest is padding, zeros in q and k
  int64_t out_stride = 0;
  JointAttentionKernel kernel = JointAttentionKernel::best;
};
/// mma or wgmma: what launch_joint_attention takes. Throws Error where args.kernel is wgmma, which does not run.
JointAttentionKernel joint_attention_kernel(const DeviceInfo& device, const JointAttentionArgs& args);
void launch_joint_attention(const Device& device, Stream& stream, const JointAttentionArgs& args);

/// y = silu(sum of the inputs) of `count` values, rounded to bf16. inputs: nullptr from the second on: none.
void launch_silu_sum(const Device& device, Stream& stream, const float* first, const float* second, const float* third,
                     int64_t count, bf16* y);

inline constexpr int kMostExperts = 1024;
/// Choices are counted in parts of so many, at most kMostRouteParts of them, each by a warp.
inline constexpr int64_t kMostRouteParts = 256;
constexpr int64_t route_part(int64_t choices) {
  const int64_t least = 256, whole = (choices + kMostRouteParts - 1) / kMostRouteParts;
  return whole < least ? least : (whole + 31) / 32 * 32;
}
constexpr int64_t route_parts(int64_t choices) { return (choices + route_part(choices) - 1) / route_part(choices); }

/// Which experts tokens go to, as model::flux::route says: the top_k largest of each row of logits, of equal ones the
/// lower expert; an expert's rows in the order of their tokens.
struct RouteArgs {
  const float* logits = nullptr;  // [M][logit_stride]
  int64_t logit_stride = 0;
  int64_t M = 0;
  int experts = 0, top_k = 0;  // experts: at most kMostExperts; top_k: at most 32; M top_k < 2^31
  bool normalize = true;
  int32_t* expert = nullptr;   // [M][top_k], work space
  int32_t* counts = nullptr;   // [experts][route_parts(M top_k)], at most kMostRouteParts; work space
  int32_t* offsets = nullptr;  // [experts + 1]
  int32_t* token = nullptr;    // [M top_k]: of a row
  int32_t* row = nullptr;      // [M][top_k]: of a token's choices
  float* weight = nullptr;     // [M][top_k]
};
void launch_route(const Device& device, Stream& stream, const RouteArgs& args);

/// Row r of `to` is row token[r] of `from`; strides and `bytes` in bytes, multiples of 16. scale: of e4m3, one a row.
struct GatherRowsArgs {
  const std::byte* from = nullptr;
  int64_t from_stride = 0;
  const float* from_scale = nullptr;  // nullptr: none
  const int32_t* token = nullptr;
  int64_t count = 0, bytes = 0;
  std::byte* to = nullptr;
  int64_t to_stride = 0;
  float* to_scale = nullptr;
};
void launch_gather_rows(const Device& device, Stream& stream, const GatherRowsArgs& args);

/// x += gate * sum over a token's choices of weight * results[row], of rows [first, first + M).
struct CombineExpertsArgs {
  TokenRows rows;
  int64_t first = 0, M = 0, width = 0;
  int top_k = 0;
  const int32_t* row = nullptr;   // [M][top_k]
  const float* weight = nullptr;  // [M][top_k]
  const bf16* results = nullptr;  // rows aligned to 16 bytes, as those of x
  int64_t result_stride = 0;
  const float* gate = nullptr;  // [images][gate_stride]
  int64_t gate_stride = 0;
  bf16* x = nullptr;  // row `first`
  int64_t x_stride = 0;
};
void launch_combine_experts(const Device& device, Stream& stream, const CombineExpertsArgs& args);

}  // namespace lacuna::cuda
