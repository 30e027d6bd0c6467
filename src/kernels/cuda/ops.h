// src/kernels/cuda/ops.h - everything of a decoder layer that is not a linear op, on a device, for one token (M tokens
// where M is given). What each computes is in kernels/ops.h and kernels/active.h. Plain C++.
//
// All pointers are of device memory; rows of floats are aligned to 16 bytes. Launches neither wait nor allocate. The
// position lies in device memory, so that a recorded graph serves every token. On compute capability 9.0 each launch
// may begin before the one before it in the stream has ended; it waits for it before it reads or writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/scalar.h"
#include "kernels/cuda/device.h"

namespace lacuna::cuda {

/// A list of the active inputs of what a kernel wrote: ascending, the same every time. list nullptr: none.
struct Collect {
  float threshold = 0;
  const float* norms = nullptr;  // [K]
  int32_t* list = nullptr;       // [K]
  int32_t* count = nullptr;
};

/// What launches after this one add to is set on the way. count: a multiple of 4; both aligned to 16 bytes.
struct Preset {
  float* data = nullptr;
  int64_t count = 0;
  const float* values = nullptr;  // [period]: biases, again and again; nullptr: zeros
  int64_t period = 0;             // a multiple of 4; 0: count
};

/// Inputs that one token's list can be of.
inline constexpr int64_t kMostCollected = 32768;

struct NormArgs {
  float* x = nullptr;  // [M, K]
  /// x += add comes first, or where it is a sum in parts: x += add[0] + add[1] + ..., added up in this order.
  const float* add = nullptr;  // `parts` times [M, K], add_stride floats apart (a multiple of 4)
  int parts = 1;
  int64_t add_stride = 0;
  int64_t add_row = 0;  // floats from a row of a part to the next, a multiple of 4; 0: K
  /// y = norm(x) * weight (+ bias). Root mean square unless a bias is given: then mean and variance. weight nullptr:
  /// only the sum and the list, which then is of x.
  const float* weight = nullptr;
  const float* bias = nullptr;  // [K]
  float eps = 0;
  int64_t M = 1, K = 0;
  float* y = nullptr;  // [M, K], may be x
  Collect collect;     // of y; M = 1
  Preset preset;
};
void launch_norm(const Device& device, Stream& stream, const NormArgs& args);

enum class Gate : uint8_t { none, swiglu, relu };
struct GateArgs {
  Gate gate = Gate::swiglu;
  const float* x = nullptr;   // [count]; swiglu: the gate
  const float* up = nullptr;  // [count], swiglu
  float* out = nullptr;       // [count], may be x or up; none: not written
  int64_t count = 0;
  Collect collect;  // of the result, count is K
  Preset preset;
};
void launch_gate(const Device& device, Stream& stream, const GateArgs& args);

/// x += y[0] + y[1] + ..., added up in this order. y: `parts` times [count], `stride` floats apart (a multiple of 4).
void launch_add(const Device& device, Stream& stream, const float* y, int64_t count, float* x, int parts = 1,
                int64_t stride = 0);

/// One layer's keys and values: [n_kv_heads, capacity, head_dim] of f16.
struct KvCache {
  f16* keys = nullptr;
  f16* values = nullptr;
  int64_t capacity = 0;
};

/// At most this many beams.
inline constexpr int64_t kMostBeams = 4;

/// Texts that begin alike: one layer's keys and values of the positions from *first on are apart from KvCache, in
/// kMostBeams slots at most, [slots, n_kv_heads, capacity, head_dim]. Byte b of sources[p - *first] is the slot that
/// holds those of beam b at position p.
struct BeamCache {
  f16* keys = nullptr;  // nullptr: no beams
  f16* values = nullptr;
  int64_t capacity = 0;
  const uint32_t* sources = nullptr;  // [capacity]
  const int32_t* first = nullptr;
};

/// Queries, keys and values of M tokens as the linear ops left them. Token m is at *position + m; of beams, token m is
/// of beam m, all at *position, and what it stores goes to slot m.
struct Heads {
  float* q = nullptr;        // [M, n_heads, head_dim], rows q_stride apart
  const float* k = nullptr;  // [M, n_kv_heads, head_dim], rows kv_stride apart
  const float* v = nullptr;
  int64_t q_stride = 0, kv_stride = 0;
  int64_t M = 1, n_heads = 0, n_kv_heads = 0, head_dim = 0;  // head_dim: a multiple of 8, at most 256
  const float* q_norm = nullptr;  // [head_dim]: each head's root mean square norm, or nullptr
  const float* k_norm = nullptr;
  float norm_eps = 0;
  /// Rotary embedding of the first n_rot elements: tables [positions, n_rot / 2], attention scaling multiplied in.
  const float* cos = nullptr;  // nullptr: none
  const float* sin = nullptr;
  int64_t n_rot = 0;
  bool adjacent = false;
  KvCache cache;
  const int32_t* position = nullptr;
  BeamCache beams;  // launch_attention() with_heads alone takes them
};

/// Norm and rotary embedding of q in place; keys (normed, rotated) and values to the cache. position + M <= capacity.
void launch_heads(const Device& device, Stream& stream, const Heads& heads);

struct AttentionArgs {
  Heads heads;
  /// launch_heads() is part of this launch; q stays as it is. M = 1, or beams.
  bool with_heads = false;
  int64_t window = 0;
  float scale = 0;
  float* out = nullptr;  // [M, n_heads, head_dim], rows q_stride apart
  Collect collect;       // of out, K = n_heads * head_dim; M = 1
  Preset preset;
  std::byte* workspace = nullptr;  // zeros before the first launch; launches that overlap need one each
};
int64_t attention_workspace_bytes(const Device& device, int64_t M, int64_t n_heads, int64_t n_kv_heads,
                                  int64_t head_dim);
/// Softmax attention of token m over positions <= *position + m. Keys and values are f16, all else f32, sums in a fixed
/// order. Error of each weight: that of 2^x as the device computes it (2^-22) and of a rounding of the score.
void launch_attention(const Device& device, Stream& stream, const AttentionArgs& args);

struct BatchAttentionArgs {
  Heads heads;  // as launch_heads() left them; k and v are not read
  int64_t window = 0;
  float scale = 0;
  float* out = nullptr;  // [M, n_heads, head_dim], rows out_stride apart
  int64_t out_stride = 0;
};
/// The same for many tokens, on tensor cores. A query is the sum of two f16, which leaves 2^-21 of its largest element
/// (the products are exact, their sums f32); a weight is rounded to f16, 2^-11 of itself or 2^-25 of the largest, and
/// weights add up to one as rounded. Sums in a fixed order. A value that is not finite may spread to tokens before it
/// whose rows share its block of 64.
void launch_batch_attention(const Device& device, Stream& stream, const BatchAttentionArgs& args);

struct ArgmaxArgs {
  const float* x = nullptr;        // [M, N]
  int64_t M = 1, N = 0;            // N < 2^32
  int32_t* ids = nullptr;          // [M]: the smallest index of the largest value; NaN is below all; all NaN: 0
  int32_t* position = nullptr;     // += 1 afterwards, or nullptr
  std::byte* workspace = nullptr;  // argmax_workspace_bytes(M), zeros before the first launch
};
int64_t argmax_workspace_bytes(int64_t M);
void launch_argmax(const Device& device, Stream& stream, const ArgmaxArgs& args);

struct TopKCandidate {
  float logit = 0;
  int32_t id = 0;
};
struct TopKArgs {
  const float* x = nullptr;  // [M, N], N at most 2^20
  int64_t M = 1, N = 0;
  int k = 1;                           // at most N and 2048
  const int32_t* penalized = nullptr;  // [n_penalized] different ids: a positive value is divided by the penalty, any
  int64_t n_penalized = 0;             // other multiplied; ids outside [0, N) do nothing
  float penalty = 1;
  /// [M, k + 1]: the largest, descending, the smaller id first where values are equal, with NaN (whose value is lost)
  /// below all. Then the smallest id whose value in x is NaN or infinity, or -1.
  TopKCandidate* out = nullptr;
  /// M times top_k_workspace_bytes(N, k); the first int of each is kNoBadValue before the first launch.
  std::byte* workspace = nullptr;
};
inline constexpr int32_t kNoBadValue = 0x7fffffff;
int64_t top_k_workspace_bytes(int64_t N, int64_t k);
/// Throws Error for more than these.
void launch_top_k(const Device& device, Stream& stream, const TopKArgs& args);

/// *count += the number of inputs k for which |x[k]| < t (|x[k]| * norms[k] < t where norms is no nullptr): those that
/// a threshold leaves out. x: [K].
void launch_count_inactive(const Device& device, Stream& stream, const float* x, int64_t K, const float* norms, float t,
                           unsigned long long* count);

}  // namespace lacuna::cuda
